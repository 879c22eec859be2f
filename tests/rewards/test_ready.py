"""What a scorer needs is looked for before a run: one line names what is missing; nothing is loaded."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from protocol.errors import ScorerError
from protocol.ground import hub
from rewards import loading
from rewards.scorer import require_ready

TOY_CLIP = "pkg://toyworld/clip"
PHOTOS = {"detector": "rewards.geneval.photo_detector:PhotoDetector"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "hub"


def put(cache: Path, repo: str, *names: str) -> None:
    """Leave files in the cache as a download would."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("1" * 40)
    (folder / "snapshots" / ("1" * 40)).mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / "snapshots" / ("1" * 40) / name).write_text("{}")


@pytest.mark.parametrize(
    ("scorer", "args", "message"),
    [
        ("pickscore", {}, r"'yuvalkirstain/PickScore_v1' is not complete .* cannot be reached: run `hf download yuval"),
        ("pickscore", {"model": "/no/where"}, "'/no/where' must be a folder or a hub id, got neither here: correct"),
        ("pickscore", {"model": "pkg://nothing/clip"}, "cannot be resolved: .* not installed"),
        ("pickscore", {"model": TOY_CLIP, "processor": "/no/where"}, "'/no/where' must be a folder"),
        ("clipscore", {}, "'openai/clip-vit-large-patch14' is not complete in the hub cache"),
        ("hpsv2", {"model": "/no/where"}, "'/no/where' must be a folder"),
        ("aesthetic", {"head": "/no/head.pth"}, "'/no/head.pth' must be a file"),
        ("aesthetic", {"head": __file__}, "'openai/clip-vit-large-patch14' is not complete"),
        ("geneval", PHOTOS, "'facebook/mask2former-swin-small-coco-instance' is not complete"),
        ("geneval", {"detector": "no.such:Thing"}, "no.such"),
        (
            "flow_grpo",
            {"url": "http://127.0.0.1:1"},
            "no server answers at http://127.0.0.1:1: .*; start it first, or correct url",
        ),
        ("vlm_judge", {"url": "http://127.0.0.1:1/v1", "model": "x"}, "no server answers at http://127.0.0.1:1/v1"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_is_missing_is_one_line(scorer: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as failed:
        require_ready(scorer, args)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(("engine", "extra"), [("rapidocr", "ocr"), ("paddleocr", "paddleocr")])
def test_a_missing_library_of_ocr_is_named_with_its_installation(
    engine: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = loading.find_spec
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == engine else found(name))
    with pytest.raises(ScorerError, match=rf"No module named '{engine}'; pip install -e '\.\[{extra}\]'"):
        require_ready("ocr", {"engine": engine})


def test_what_is_there_is_ready(cache: Path) -> None:
    require_ready("pickscore", {"model": TOY_CLIP})
    require_ready("geneval", {"detector": "toyworld.world.detector:ShapeDetector"})
    put(cache, "openai/clip-vit-large-patch14", "model.safetensors")
    with pytest.raises(ScorerError, match="is not complete"):
        require_ready("clipscore", {})
    put(cache, "openai/clip-vit-large-patch14", "preprocessor_config.json")
    require_ready("clipscore", {})
    put(cache, "facebook/mask2former-swin-small-coco-instance", "model.safetensors", "preprocessor_config.json")
    require_ready("geneval", PHOTOS)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScorerError, match=r"must hold a file \*.safetensors or \*.bin, got none"):
        require_ready("hpsv2", {"model": str(tmp_path)})


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(405)
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        del format, args


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answer) as served:
        thread = Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def test_a_server_that_answers_anything_is_there(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_ready("flow_grpo", {"url": server})
    require_ready("vlm_judge", {"url": server, "model": "x"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert hub.hub_answers(server)
    assert not hub.hub_answers("http://127.0.0.1:1")
