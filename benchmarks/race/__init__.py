"""The race between methods: which one reaches a score first, in iterations and in seconds."""
