"""OCR: does the image show the words that its prompt quotes?"""
