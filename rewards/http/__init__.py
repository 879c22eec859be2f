"""Scorers behind HTTP: our own reward service, Flow-GRPO's servers, and a vision-language judge."""
