"""Models come from a hub that speaks the real protocol, by the real huggingface_hub, complete and verified."""

import errno
import fcntl
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from harness.fuzz.files import gguf_seed
from harness.servers.hub import SIGNATURE, HubRepo, StandInHub
from unit.model.hub.conftest import REPO, files_of
from unit.weights.test_safetensors import make_folder, weights

from kvferry.core.errors import KvferryError, ModelFileError, Unavailable, UnknownModel
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.model.hub import download as downloading
from kvferry.model.hub.download import HubAccess, HubModel, fetch_hub_model, hub_name, pinned_model
from kvferry.model.hub.names import HubName
from kvferry.model.source import open_model

NAME = HubName(REPO)


def fetch(name: HubName, access: HubAccess) -> HubModel:
    return fetch_hub_model(name, access=access)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def default_access(hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-in the hub of this process, as `HF_ENDPOINT` and `HF_HUB_CACHE` would."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(access.cache))


def test_the_needed_files_are_fetched_once_and_open(hub: StandInHub, access: HubAccess) -> None:
    events: list[tuple[str, int, int]] = []
    found = fetch_hub_model(NAME, access=access, progress=lambda *event: events.append(event))
    assert found.name.is_pinned
    assert found.name.repo == REPO
    assert sorted(hub.fetched()) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in found.path.iterdir()) == sorted(hub.fetched())
    size = len(hub.repos[REPO].files["model.safetensors"])
    for stage in (f"download {size / (1 << 20):.1f} MiB", f"verify {size / (1 << 20):.1f} MiB"):
        steps = [event[1:] for event in events if event[0] == stage]
        assert steps[-1] == (size, size)
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert [done for done, _ in steps].count(size) == 1
    assert events[0] == (f"download {size / (1 << 20):.1f} MiB", 0, size)
    hub.requests.clear()
    assert fetch(NAME, access) == found
    assert [one.path for one in hub.requests] == [f"/api/models/{REPO}"], "only the commit is asked for"


def test_a_model_by_name_generates_like_its_folder(
    hub: StandInHub, default_access: None, tmp_path: Path, tiny_files: dict[str, bytes]
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, content in tiny_files.items():
        (folder / name).write_bytes(content)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    ours, theirs = (
        LLM(model, kv_memory="16MiB", dtype="float32").generate(["hello"], sampling)[0].token_ids
        for model in (REPO, str(folder))
    )
    assert ours == theirs
    source = open_model(REPO)
    assert source.config.name == REPO
    assert source.digest == open_model(str(folder)).digest
    assert open_model(f"hf://{REPO}@main", served_name="mine").config.name == "mine"


def test_a_gguf_file_is_chosen_by_its_quantization(hub: StandInHub, default_access: None, tmp_path: Path) -> None:
    file = gguf_seed()
    hub.repos["org/m-GGUF"] = HubRepo({"README.md": b"", "q/m-F32.gguf": file, "m-Q8_0.gguf": b"other"})
    source = open_model("org/m-GGUF:F32")
    assert source.config.name == "org/m-GGUF:F32"
    assert hub.fetched() == ["m-F32.gguf"]
    (tmp_path / "m.gguf").write_bytes(file)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    ours, theirs = (
        LLM(model, kv_memory="16MiB", dtype="float32").generate(["a"], sampling)[0].token_ids
        for model in ("org/m-GGUF:F32", str(tmp_path / "m.gguf"))
    )
    assert ours == theirs
    with pytest.raises(UnknownModel, match=r"\(Q8_0, F32\)"):
        open_model("org/m-GGUF:Q4_0")
    hub.repos["org/m-GGUF"].files = {f"m-Q4_0-0000{i}-of-00002.gguf": b"part %d" % i for i in (1, 2)}
    pinned = pinned_model("org/m-GGUF:Q4_0")
    path = fetch_hub_model(HubName("org/m-GGUF", "Q4_0")).path
    assert path.name == "m-Q4_0-00001-of-00002.gguf"
    assert (path.parent / "m-Q4_0-00002-of-00002.gguf").read_bytes() == b"part 2"
    assert pinned == f"hf://org/m-GGUF:Q4_0@{path.parent.name}"


def test_shards_of_an_index_are_fetched(hub: StandInHub, access: HubAccess, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sharded")
    files = files_of(folder)
    whole = files.pop("model.safetensors")
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    files |= {shards[0]: whole, shards[1]: b"not read here", "model-00003-of-00002.safetensors": b"not listed"}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    hub.repos[REPO] = HubRepo(files)
    found = fetch(NAME, access)
    assert sorted(path.name for path in found.path.glob("*.safetensors")) == shards


def test_offline_the_cache_is_used_without_a_request(
    hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fetch(NAME, access)
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch(NAME, access) == found
    assert fetch(found.name, access) == found
    assert hub.requests == []


def test_a_commit_in_the_cache_needs_no_request(hub: StandInHub, access: HubAccess) -> None:
    found = fetch(NAME, access)
    hub.requests.clear()
    assert fetch(found.name, access) == found
    assert hub.requests == []


@pytest.mark.usefixtures("offline")
def test_offline_and_not_cached_is_an_error_with_what_to_do(hub: StandInHub, access: HubAccess) -> None:
    for name in (NAME, replace(NAME, revision="v1")):
        with pytest.raises(ModelFileError, match=f"HF_HUB_OFFLINE is set; run `kvferry pull {name.given}`"):
            fetch(name, access)
    assert hub.requests == []


def test_a_part_of_a_model_in_the_cache_is_completed(hub: StandInHub, access: HubAccess) -> None:
    found = fetch(NAME, access)
    weights_file = found.path / "model.safetensors"
    os.unlink(weights_file.resolve())
    hub.requests.clear()
    assert fetch(found.name, access) == found
    assert hub.fetched() == ["model.safetensors"]
    assert weights_file.read_bytes() == hub.repos[REPO].files["model.safetensors"]


def test_a_cut_transfer_is_resumed_where_it_ended(
    hub: StandInHub,
    access: HubAccess,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The library keeps whole chunks only: of 10 MiB, which the file does not have.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 10)
    size = len(hub.repos[REPO].files["model.safetensors"])
    hub.cuts["model.safetensors"] = [size // 2, 5000]
    found = fetch(NAME, access)
    ranges = [one.range for one in hub.requests if one.path.endswith("model.safetensors") and one.method == "GET"]
    assert ranges[0] in {"", "bytes=0-"}
    starts = [int(each.removeprefix("bytes=").removesuffix("-")) for each in ranges if each]
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1] < size
    assert (found.path / "model.safetensors").read_bytes() == hub.repos[REPO].files["model.safetensors"]
    told = caplog.text + "".join(capfd.readouterr())
    assert SIGNATURE not in told


def test_a_transfer_that_is_cut_for_good_is_an_error_and_leaves_nothing_half(
    hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cuts["model.safetensors"] = [0] * 100
    with pytest.raises(Unavailable, match="connection was cut") as caught:
        fetch(NAME, access)
    assert SIGNATURE not in caught.value.message
    assert list(Path(str(access.cache)).rglob("*.incomplete")) == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFileError, match="not in the cache"):
        fetch(NAME, access)
    monkeypatch.undo()
    hub.cuts.clear()
    hub.requests.clear()
    fetch(NAME, access)
    assert hub.fetched() == ["model.safetensors"], "the files that were whole are kept"


def changed(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_wrong_digest_is_an_error_and_the_file_is_removed(hub: StandInHub, access: HubAccess, file: str) -> None:
    hub.instead[file] = changed(hub.repos[REPO].files[file])
    for _ in range(2):
        with pytest.raises(ModelFileError, match=rf"{file} does not have the digest [0-9a-f]+ that the hub gives"):
            fetch(NAME, access)
        left = [path for path in Path(str(access.cache)).rglob("*") if path.is_file() or path.is_symlink()]
        assert not any(path.name == file for path in left)
        assert not any(path.read_bytes() == hub.instead[file] for path in left if path.is_file())
    hub.instead.clear()
    assert (fetch(NAME, access).path / file).read_bytes() == hub.repos[REPO].files[file]


@pytest.mark.parametrize("claimed", ["/dev/zero", "../../x", "", None, "A" * 64, 7])
def test_without_a_digest_in_the_list_the_one_of_the_transfer_is_used(
    hub: StandInHub, access: HubAccess, claimed: object
) -> None:
    hub.repos[REPO].digests = {"model.safetensors": claimed, "tokenizer.json": claimed}
    hub.instead["model.safetensors"] = changed(hub.repos[REPO].files["model.safetensors"])
    with pytest.raises(ModelFileError, match=r"model\.safetensors does not have the digest [0-9a-f]{64} "):
        fetch(NAME, access)
    hub.instead.clear()
    fetch(NAME, access)


def test_a_cache_without_links_is_verified_by_the_list(
    hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_SYMLINKS", True)
    found = fetch(NAME, access)
    assert not (found.path / "model.safetensors").is_symlink()
    assert "is not verified" not in caplog.text
    fetch(found.name, access)
    assert "model.safetensors is not verified: the hub gives no digest, or the cache has no links" in caplog.text


def test_a_digest_of_the_list_that_is_not_that_of_the_transfer_is_an_error(hub: StandInHub, access: HubAccess) -> None:
    hub.repos[REPO].digests = {"model.safetensors": "0" * 64}
    with pytest.raises(ModelFileError, match=f"does not have the digest {'0' * 64}"):
        fetch(NAME, access)


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_file_that_changes_in_the_cache_is_found(
    hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    found = fetch(NAME, access)
    place = (found.path / "model.safetensors").resolve()
    place.chmod(0o644)
    place.write_bytes(changed(place.read_bytes()))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(ModelFileError, match="does not have the digest"):
        fetch(NAME, access)
    assert not place.exists()


def test_a_file_is_read_for_its_digest_once(
    hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fetch(NAME, access)
    monkeypatch.setattr("kvferry.model.hub.digests.content_digest", None)
    assert fetch(NAME, access) == found
    assert fetch(found.name, access) == found


def test_a_disk_that_is_too_small_is_told_before_the_download(hub: StandInHub, access: HubAccess) -> None:
    size = len(hub.repos[REPO].files["model.safetensors"])
    with pytest.raises(
        ModelFileError, match=r"needs .* MiB in .*, where .* MiB are free; free space, or set HF_HUB_CA"
    ):
        fetch(NAME, replace(access, free_bytes=lambda _: size - 1))
    assert "model.safetensors" not in hub.fetched()
    fetch(NAME, replace(access, free_bytes=lambda _: size))


def test_a_disk_that_fills_is_an_error(hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download._chmod_and_move", full)
    with pytest.raises(ModelFileError, match="the disk of the cache is full; free space, or set HF_HUB_CACHE"):
        fetch(NAME, access)


def test_a_gated_model_needs_a_token_which_is_never_shown(
    hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.repos[REPO].gated, hub.repos[REPO].token = True, "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelFileError) as caught:
        fetch(NAME, access)
    assert f"is gated: accept its licence at {hub.url}/{REPO}, and set HF_TOKEN" in caught.value.message
    assert caught.value.field == "model"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    fetch(NAME, access)
    assert "Bearer hf_right" in {one.authorization for one in hub.requests}
    stored = [one for one in hub.requests if one.path.endswith("/model.safetensors") and "resolve" not in one.path]
    assert {one.authorization for one in stored} == {""}, "the store of large files gets no token"
    assert "hf_wrong" not in caught.value.message + caplog.text
    assert "hf_right" not in caplog.text
    assert caplog.text.count("X-Signature") == 0, "addresses of large files are signed"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("org/tiny-modle", REPO), ("org/tiny", REPO), ("orgg/tiny-model", REPO), ("Org/Tiny-Model2", REPO)],
)
def test_a_name_that_does_not_exist_suggests_one_that_does(
    hub: StandInHub, access: HubAccess, typo: str, meant: str
) -> None:
    hub.repos |= {f"org/other-{i}": HubRepo({}) for i in range(100)} | {"bad/na--me": HubRepo({})}
    with pytest.raises(UnknownModel) as caught:
        fetch(HubName(typo), access)
    assert f"did you mean {meant}?" in caught.value.message
    assert "set HF_TOKEN" in caught.value.message


def test_a_private_model_is_as_unknown_as_one_that_does_not_exist(hub: StandInHub, access: HubAccess) -> None:
    hub.repos = {"someone/secret": HubRepo({}, private=True, token="t")}
    with pytest.raises(UnknownModel, match="neither a local folder nor a model that http") as caught:
        fetch(HubName("someone/else"), access)
    assert "did you mean" not in caught.value.message


def test_revisions_are_branches_tags_and_commits(hub: StandInHub, access: HubAccess, tmp_path: Path) -> None:
    halves = {name: values.astype(np.float16) for name, values in weights().items()}
    other = files_of(make_folder(tmp_path / "other", tensors=halves))
    hub.repos[REPO].revisions = {"v1.0": other, "refs/pr/3": other}
    commits = {}
    for revision in ("", "main", "v1.0", "refs/pr/3"):
        found = fetch(replace(NAME, revision=revision), access)
        commits[revision] = found.name.revision
        assert (found.path / "model.safetensors").stat().st_size == len(
            (other if revision in {"v1.0", "refs/pr/3"} else hub.repos[REPO].files)["model.safetensors"]
        )
    assert commits[""] == commits["main"] != commits["v1.0"]
    hub.requests.clear()
    fetch(NAME.pinned(commits["v1.0"]), access)
    assert hub.requests == []
    with pytest.raises(UnknownModel, match=f"has no revision 'v2'; use a branch or a tag at {hub.url}/{REPO}"):
        fetch(replace(NAME, revision="v2"), access)


def test_the_resolved_commit_is_logged(hub: StandInHub, access: HubAccess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    found = fetch(NAME, access)
    assert f"model {REPO}: commit {found.name.revision}" in caplog.text


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_cannot_serve_is_told_or_the_cache_is_used(
    hub: StandInHub, access: HubAccess, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    hub.status = status
    with pytest.raises(Unavailable, match=str(status)):
        fetch(NAME, access)
    hub.status = 0
    found = fetch(NAME, access)
    hub.status = status
    assert fetch(NAME, access) == found
    assert f"the hub does not answer; {REPO} is served at commit {found.name.revision}" in caplog.text


def test_a_hub_that_cannot_be_reached_is_told(hub: StandInHub, access: HubAccess) -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9 cannot be reached, .*check the network and HF_ENDPO"):
        fetch(NAME, replace(access, endpoint="http://user:password@127.0.0.1:9"))


def test_what_killed_downloads_have_left_is_removed(hub: StandInHub, access: HubAccess, tmp_path: Path) -> None:
    folder = tmp_path / "hf/models--org--tiny-model"
    locks = tmp_path / "hf/.locks/models--org--tiny-model"
    (folder / "blobs").mkdir(parents=True)
    locks.mkdir(parents=True)
    old, young, locked = (folder / "blobs" / f"{each * 64}.01234567.incomplete" for each in "abc")
    for path in (old, young, locked):
        path.write_bytes(b"half")
        (locks / f"{path.name[:64]}.lock").touch()
    for path in (old, locked):
        os.utime(path, (0, 0))
    with (locks / f"{'c' * 64}.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        fetch(NAME, access)
    assert [path.exists() for path in (old, young, locked)] == [False, True, True]


def test_a_hub_that_lists_files_and_does_not_give_them_is_told(
    hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a hub that names a store of its own for large files, and refuses the token for it."""
    hub.repos[REPO].is_withheld = True
    with pytest.raises(ModelFileError, match=r"refuses access \(401\); set HF_TOKEN"):
        fetch(NAME, access)


def test_a_token_that_the_hub_refuses_is_told(hub: StandInHub, access: HubAccess) -> None:
    hub.status = 403
    with pytest.raises(ModelFileError, match=r"refuses access \(403\); set HF_TOKEN"):
        fetch(NAME, access)


def test_a_server_that_is_no_hub_is_told(hub: StandInHub, access: HubAccess) -> None:
    hub.status = 200
    with pytest.raises(KvferryError, match="check HF_ENDPOINT"):
        fetch(NAME, access)


def test_pickles_and_python_are_never_fetched(hub: StandInHub, access: HubAccess) -> None:
    del hub.repos[REPO].files["model.safetensors"]
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin\); convert it to safetensors"):
        fetch(NAME, access)
    assert hub.fetched() == []


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub: StandInHub, access: HubAccess) -> None:
    hub.repos[REPO].files["config.json"] = b'{"architectures": ["StrangeForCausalLM"]}'
    with pytest.raises(ModelFileError, match=r"StrangeForCausalLM.*not supported"):
        fetch(NAME, access)
    assert "model.safetensors" not in hub.fetched()


def test_paths_that_leave_the_folder_are_not_fetched(hub: StandInHub, access: HubAccess, tmp_path: Path) -> None:
    repo = hub.repos[REPO]
    repo.listed = ("../../../evil.safetensors", "/etc/evil.safetensors", "a/../../evil.gguf")
    fetch(NAME, access)
    assert list(tmp_path.rglob("*evil*")) == []
    index = {"weight_map": {"a": "../../../evil.safetensors"}}
    repo.files["model.safetensors.index.json"] = json.dumps(index).encode()
    with pytest.raises(ModelFileError, match=r"lists '\.\./\.\./\.\./evil\.safetensors'"):
        fetch(NAME, access)
    hub.repos["org/x"] = HubRepo({}, listed=("../m-Q8_0.gguf",))
    with pytest.raises(ModelFileError, match="no GGUF files"):
        fetch(HubName("org/x", "Q8_0"), access)


def test_a_server_that_sends_more_than_announced_is_stopped(
    hub: StandInHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.model.hub.transfer._SLACK_BYTES", 0)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 10)
    hub.instead["model.safetensors"] = bytes(8 << 20)
    with pytest.raises(ModelFileError, match=r"the server sent more than the .* bytes that the hub announced"):
        fetch(NAME, access)


@pytest.mark.filterwarnings("ignore:Not enough free disk space")  # of the library, which asks the real disk
def test_files_above_50_gb_need_another_transport(hub: StandInHub, access: HubAccess) -> None:
    hub.repos[REPO].sizes["model.safetensors"] = 60 * 1000**3
    with pytest.raises(ModelFileError, match="more than 50 GB, which needs hf_xet"):
        fetch(NAME, replace(access, free_bytes=lambda _: 1 << 50))


def test_a_local_folder_of_the_same_name_wins(
    hub: StandInHub, default_access: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    make_folder(tmp_path / REPO)
    monkeypatch.chdir(tmp_path)
    assert open_model(REPO).config.name == "tiny-model"
    assert pinned_model(REPO) == REPO
    assert hub.requests == []
    assert hub_name(f"hf://{REPO}") == NAME
    assert open_model(f"hf://{REPO}").config.name == REPO


@pytest.mark.parametrize("spec", ["./models/x", "/models/x", "models/x/y", "models/x.gguf", "x"])
def test_a_mistyped_path_makes_no_request(hub: StandInHub, default_access: None, spec: str) -> None:
    assert pinned_model(spec) == spec
    with pytest.raises((UnknownModel, ModelFileError)):
        open_model(spec)
    assert hub.requests == []


def test_the_free_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    assert downloading._free_bytes(tmp_path / "a" / "b") > 0
