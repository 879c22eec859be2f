"""`python -m flowcredit` is the console script `flowcredit`."""

from flowcredit.start import main

if __name__ == "__main__":
    main()
