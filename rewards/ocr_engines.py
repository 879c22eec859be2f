"""The engines behind the OCR scorer: RapidOCR (default) and PaddleOCR."""

from typing import Any

import numpy as np

LONGEST_SIDE = 960
"""Pixels to which a larger picture is scaled down for text detection; smaller ones are not scaled up."""


class RapidOcr:
    """RapidOCR on onnxruntime; its PP-OCR models come inside the package, so nothing is fetched.

    Upside-down lines are not turned, as in the sources of the reward.
    """

    def __init__(self, *, threads: int = 1) -> None:
        """Load detection and recognition."""
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
