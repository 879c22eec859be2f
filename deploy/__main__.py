"""`python -m deploy` is the console script `flowcredit`."""

from deploy.cli.app import main

if __name__ == "__main__":
    main()
