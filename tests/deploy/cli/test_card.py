"""The model card of a run, in a folder and in an upload to a stand-in of the hub."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
import yaml
from safetensors.numpy import load

from deploy.folder.read import evaluation_scores
from tests.support.runs.presets import dark_preset


class Hub(BaseHTTPRequestHandler):
    """Answers as much of the hub's API as an upload asks, and keeps the files of its commits."""

    kept: ClassVar[dict[str, bytes]] = {}
    token = "Bearer hf_test"

    @property
    def home(self) -> str:
        return f"http://{self.headers['Host']}"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != self.token:
            return self._say({"error": "Invalid credentials"}, status=401)
        if self.path.endswith("/repos/create"):
            return self._say({"url": f"{self.home}/me/{json.loads(body)['name']}"})
        if self.path.endswith("/validate-yaml"):
            return self._say({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [{"path": each["path"]} for each in json.loads(body)["files"]]
            return self._say({"files": [each | {"uploadMode": "regular", "shouldIgnore": False} for each in files]})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.kept[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._say({"commitUrl": f"{self.home}/me/dark/commit/1", "commitOid": "1", "success": True})

    def _say(self, answer: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    monkeypatch.setattr(Hub, "kept", {})
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield Hub.kept
        server.shutdown()
        thread.join()


def test_a_folder_and_an_upload_have_a_card_with_scores_images_and_config(tiny_sd3, tmp_path, hub, monkeypatch, cli):
    run = tmp_path / "run"
    words = ("--local", "--no-page", "--run", str(run), "status.board=off")
    cli.done("train", str(dark_preset(tmp_path, tiny_sd3)), *words)
    assert "--push OWNER/NAME" in cli.refused("export", str(run))

    monkeypatch.setattr(Hub, "token", "Bearer hf_other")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    line = cli.refused("export", str(run), "--push", "me/dark")
    assert "--push me/dark must be a repository that you may write to" in line and not hub

    monkeypatch.setattr(Hub, "token", "Bearer hf_test")
    assert (
        cli.done("export", str(run), str(tmp_path / "merged"), "--push", "me/dark")
        .splitlines()[-1]
        .endswith("/me/dark/commit/1")
    )
    assert set(hub) == {"README.md", "before_after.png", "pytorch_lora_weights.safetensors"}
    assert len(load(hub["pytorch_lora_weights.safetensors"])) > 0
    scores = evaluation_scores(run)
    for card in (hub["README.md"].decode(), (tmp_path / "merged" / "README.md").read_text()):
        _, header, text = card.split("---\n", 2)
        assert yaml.safe_load(header)["library_name"] == "diffusers"
        assert f"{scores[0]:.3f} before, {scores[1]:.3f} after" in text
        assert "95 % by a paired bootstrap over 2 prompts" in text
        assert "| reward | 1.0 dark |" in text and "| credit | gae, normalised per_step |" in text
        fields = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
        assert not [key for key in fields if key.startswith(("status.", "checkpoint."))]
        assert (fields["group.size"], fields["learner.learning_rate"]) == (4, 0.05)
    assert 'load_lora_weights("me/dark")' in hub["README.md"].decode()
    assert (tmp_path / "merged" / "before_after.png").read_bytes()[:4] == b"\x89PNG"
