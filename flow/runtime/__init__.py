"""How torch and the model libraries run: device, threads, precision, and quiet loading."""
