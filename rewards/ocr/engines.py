"""The engines of the OCR scorer: RapidOCR (default) and PaddleOCR."""

from typing import Any

import numpy as np

from protocol.errors import ScorerError
from rewards.loading import require_library

LONGEST_SIDE = 960
"""Longest side of an image in text detection, in pixels. Larger images are scaled down, smaller ones are not scaled."""
LINE_HEIGHT = 48
"""Height of a line of text in the recognition models, in pixels."""


class RapidOcr:
    """RapidOCR on onnxruntime. Its PP-OCR models are part of the package, so nothing is downloaded.

    Upside-down lines are not rotated, as in the sources of the reward. An image with a side above 960 pixels is scaled
    down.
    """

    def __init__(self, *, threads: int = 1, line_width: int = 320) -> None:
        """Load detection and recognition.

        Args:
            threads: CPU threads that read one image.
            line_width: least width of a line of text in pixels, for a height of 48; shorter lines are padded to it. The
                models' own 320 holds about 15 letters. A smaller number is faster for short words, and longer lines
                are still read whole.

        Raises:
            ScorerError: `line_width` is too small for a letter.
        """
        if line_width < LINE_HEIGHT:
            raise ScorerError(f"line_width of rapidocr must be at least {LINE_HEIGHT}, got {line_width}: raise it")
        import logging

        import cv2
        from rapidocr import RapidOCR

        cv2.setNumThreads(threads)
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)
        self._engine = RapidOCR(
            params={
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Global.log_level": "error",
                "Global.use_cls": False,
                "Det.limit_type": "max",
                "Det.limit_side_len": LONGEST_SIDE,
                "Rec.rec_img_shape": [3, LINE_HEIGHT, line_width],
            }
        )

    @staticmethod
    def ready(**_: Any) -> None:
        """Raise ModuleNotFoundError if a library is missing."""
        for name in ("cv2", "onnxruntime", "rapidocr"):
            require_library(name)

    def read(self, image: np.ndarray) -> list[str]:
        """The lines with a confidence above 0, in the engine's order."""
        found: Any = self._engine(np.ascontiguousarray(image[..., ::-1]))
        if found.txts is None:
            return []
        return [text for text, confidence in zip(found.txts, found.scores, strict=True) if confidence > 0]


class PaddleOcr:
    """PaddleOCR 3 with English models, which it downloads at its first use; it has not been run."""

    def __init__(self, *, threads: int = 1) -> None:
        """Load detection and recognition."""
        from paddleocr import PaddleOCR

        self._engine: Any = PaddleOCR(
            lang="en",
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
            cpu_threads=threads,
        )

    @staticmethod
    def ready(**_: Any) -> None:
        """Raise ModuleNotFoundError if the library is missing."""
        require_library("paddleocr")

    def read(self, image: np.ndarray) -> list[str]:
        lines = []
        for page in self._engine.predict(np.ascontiguousarray(image[..., ::-1])):
            pairs = zip(page["rec_texts"], page["rec_scores"], strict=True)
            lines += [text for text, confidence in pairs if confidence > 0]
        return lines
