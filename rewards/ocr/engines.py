"""The engines behind the OCR scorer: RapidOCR (default) and PaddleOCR."""

from typing import Any

import numpy as np

from protocol.errors import ScorerError

LONGEST_SIDE = 960
"""Pixels to which a larger image is scaled down for text detection; smaller ones are not scaled up."""
LINE_HEIGHT = 48
"""Pixels to which the recognition models scale a line of text."""


class RapidOcr:
    """RapidOCR on onnxruntime; its PP-OCR models come inside the package, so nothing is fetched.

    Upside-down lines are not turned, as in the sources of the reward.
    """

    def __init__(self, *, threads: int = 1, line_width: int = 320) -> None:
        """Load detection and recognition.

        Args:
            threads: CPU threads of one reading.
            line_width: pixels to which a line of text, 48 high, is at least padded. The models' own 320 holds some 15
                letters; less is faster where only short words occur, and longer lines are still read whole.

        Raises:
            ScorerError: `line_width` is too small for a letter.
        """
        if line_width < LINE_HEIGHT:
            raise ScorerError(f"line_width of rapidocr must be at least {LINE_HEIGHT}, got {line_width}")
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

    def read(self, image: np.ndarray) -> list[str]:
        """The lines with a confidence above 0, in the engine's order."""
        found: Any = self._engine(np.ascontiguousarray(image[..., ::-1]))
        if found.txts is None:
            return []
        return [text for text, confidence in zip(found.txts, found.scores, strict=True) if confidence > 0]


class PaddleOcr:
    """PaddleOCR 3 with English models, which it fetches at its first use."""

    def __init__(self, *, threads: int = 1) -> None:
        """Load detection and recognition."""
        from paddleocr import PaddleOCR  # pyright: ignore[reportMissingImports]

        self._engine: Any = PaddleOCR(
            lang="en",
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
            cpu_threads=threads,
        )

    def read(self, image: np.ndarray) -> list[str]:
        """The lines with a confidence above 0, in the engine's order."""
        lines = []
        for page in self._engine.predict(np.ascontiguousarray(image[..., ::-1])):
            pairs = zip(page["rec_texts"], page["rec_scores"], strict=True)
            lines += [text for text, confidence in pairs if confidence > 0]
        return lines
