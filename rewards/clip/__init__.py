"""Scorers that compare CLIP features: PickScore, CLIP score, HPSv2, the aesthetic predictor."""
