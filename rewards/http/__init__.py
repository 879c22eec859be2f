"""Scorers that call a server over HTTP: our own reward service, Flow-GRPO's servers, and vision-language judges."""
