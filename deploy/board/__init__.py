"""The status board on Redis or Valkey: its documents, its lease, and the embedded server."""
