"""Scorers that use CLIP features: PickScore, CLIPScore, HPSv2 and the aesthetic predictor."""
