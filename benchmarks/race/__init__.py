"""The race between methods: which reaches a score first, by iterations and by seconds."""
