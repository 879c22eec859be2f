"""Prompt files: made from GenEval's forms, or fetched from public addresses."""
