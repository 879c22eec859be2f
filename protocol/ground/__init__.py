"""The ground floor that all packages share: paths, files, addresses, the model hub, and code or weights of others."""
