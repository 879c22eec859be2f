"""How the toy world's models were trained and exported. No run needs this."""
