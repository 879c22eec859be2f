"""OCR: does the image show the words that its prompt puts in double quotes?"""
