"""matrix.json and what repeats it: a stale file is found, and renewing asks where it should."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import ROOT, locks, matrix, pins
from tools.errors import BuildError
from tools.units import ARCHS


def test_nothing_is_stale() -> None:
    assert pins.stale() == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("docker/Dockerfile", "ARG BUILDER_BASE=quay.io", "ARG BUILDER_BASE=elsewhere.io"),
        ("docker/docker-bake.json", '"FLASH_KDA_CUDA_ARCHS": "103a"', '"FLASH_KDA_CUDA_ARCHS": "103f"'),
        ("pyproject.toml", '"cp310-manylinux_*", ', ""),
        ("pyproject.toml", 'manylinux-aarch64-image = "quay.io', 'manylinux-aarch64-image = "elsewhere.io'),
        ("flake.nix", "nixpkgs/2", "nixpkgs/3"),
        ("flake.lock", "sha256-4", "sha256-5"),
        ("nix/wheels.json", '"sha256": "2', '"sha256": "3'),
    ],
)
def test_each_stale_file_is_found(
    name: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in pins.rendered():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    monkeypatch.setattr(pins, "ROOT", tmp_path)
    assert pins.stale() == []
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    assert pins.stale() == [name]


def test_a_changed_matrix_makes_what_repeats_it_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    content = matrix.read()
    changed = matrix.Matrix(
        **{**vars(content), "pythons": content.pythons[1:], "nixpkgs": {"rev": "0" * 40, "narHash": "x"}}
    )
    monkeypatch.setattr(matrix, "read", lambda: changed)
    assert pins.stale() == ["docker/docker-bake.json", "pyproject.toml", "flake.nix", "flake.lock"]


def test_the_matrix_is_whole() -> None:
    content = matrix.read()
    assert content.settings[0] == "all"
    assert set(content.settings[1:]) == {arch.name for arch in ARCHS}
    assert {row["sha256"] for row in json.loads(pins.NIX_WHEELS.read_text())} == {
        digest for pin in locks.read_toolchain_lock().values() for digest in pin.hashes
    }


def test_every_setting_has_its_doors_in_the_documentation() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    for setting in matrix.read().settings[1:]:
        doors = f"`flash_kda 0.1.0+sm{setting}`, index `sm{setting}` | `flash_kda:{setting}` | `flash-kda-{setting}` |"
        assert f"| `{setting}` | {doors}" in text


def test_a_matrix_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "FILE", tmp_path / "matrix.json")
    with pytest.raises(BuildError, match=r"matrix\.json cannot be read"):
        matrix.read()
    (tmp_path / "matrix.json").write_text('{"pythons": []}')
    with pytest.raises(BuildError, match=r"matrix\.json cannot be read: .*missing"):
        matrix.read()


@pytest.fixture
def registry() -> Iterator[str]:
    """A registry that wants a token first, as Docker Hub and Quay do."""

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if self.headers.get("Authorization") != "Bearer secret":
                self.send_response(401)
                realm = f"http://{self.headers['Host']}/token"
                self.send_header(
                    "WWW-Authenticate", f'Bearer realm="{realm}",service="registry",scope="repository:a/b:pull"'
                )
            elif self.path == "/v2/a/b/manifests/1.0":
                assert "oci.image.index" in self.headers["Accept"]
                self.send_response(200)
                self.send_header("Docker-Content-Digest", "sha256:" + "1" * 64)
            else:
                self.send_response(404)
            self.end_headers()

        def do_GET(self) -> None:
            assert self.path == "/token?service=registry&scope=repository%3Aa%2Fb%3Apull"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"token": "secret"}')

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_digest_of_an_image_is_asked_of_its_registry(registry: str) -> None:
    assert pins.image_digest(f"{registry}/a/b:1.0@sha256:{'0' * 64}", "http") == "sha256:" + "1" * 64
    with pytest.raises(BuildError, match=r"does not tell the digest of a/b:2\.0: .*404"):
        pins.image_digest(f"{registry}/a/b:2.0", "http")
    with pytest.raises(BuildError, match="is not REGISTRY/NAME:TAG"):
        pins.image_digest("a/b")


def test_renewed_digests_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "matrix.json"
    copy.write_text(matrix.FILE.read_text())
    monkeypatch.setattr(matrix, "FILE", copy)
    monkeypatch.setattr(pins, "image_digest", lambda reference: "sha256:" + "2" * 64)
    before = matrix.read()
    pins.renew_images(lambda line: None)
    after = matrix.read()
    assert {reference.split("@")[1] for reference in after.images.values()} == {"sha256:" + "2" * 64}
    assert [r.split("@")[0] for r in after.images.values()] == [r.split("@")[0] for r in before.images.values()]
    assert after.archs == before.archs
