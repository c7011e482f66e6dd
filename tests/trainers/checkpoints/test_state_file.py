"""state.json: what is no such file is one short error that names the file and the key."""

import json

import pytest

from trainers.checkpoints import state_file

GOOD = {
    "format": 4, "kind": "gpt", "iteration": 10, "updates": 9, "masters": True,
    "loss_scaler": {"scale": 256.0, "good_steps": 1, "overflows": 0},
    "data": {"start": 0, "sources": [
        {"name": "a", "identity": "b", "samples": 5, "weight": "1/1", "before": 0, "consumed": 80,
         "checksums": "d", "written": 7}],
        "vocabulary": "c", "order": 2},
    "settings": {"num_layers": 2, "global_batch_size": 8, "lr": 1e-3, "load": None, "data_path": ["a", "b"]},
    "parameters": {"w": {"shape": [6, 4], "view": [3, 2, 4], "dim": 1, "count": 2}},
}  # fmt: skip


def refused(path, raw):
    path.write_bytes(raw)
    with pytest.raises(ValueError) as caught:
        state_file.read(path)
    said = str(caught.value)
    assert said.startswith(str(path)) and len(said) < len(str(path)) + 500 and said.isprintable()
    return said


def test_what_is_written_is_read(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(GOOD))
    read = state_file.read(tmp_path / "state.json")
    assert json.loads(json.dumps(read.model_dump())) == GOOD
    older = {name: value for name, value in GOOD["data"].items() if name not in ("vocabulary", "order")}
    (source,) = GOOD["data"]["sources"]
    less = {name: value for name, value in source.items() if name not in ("checksums", "written")}
    older |= {"sources": [less]}
    (tmp_path / "state.json").write_text(json.dumps(GOOD | {"data": older}))
    data = state_file.read(tmp_path / "state.json").data
    assert data is not None and data.model_dump() == older | {
        "sources": [less | {"checksums": "", "written": 0}], "vocabulary": None, "order": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "parameters", "kind"),
    [
        ({}, ["embedding.weight", "layers.0.x", "final_norm.weight", "output.weight"], "gpt"),
        ({}, ["embedding.weight", "layers.0.x", "final_norm.weight", "mlm_head.bias"], "bert"),
        ({"task": "race", "doc_stride": 128}, ["embedding.weight", "classifier.weight"], "finetune"),
        ({"optimizer": {}, "extra": {}}, ["weight"], None),
    ],
)
def test_the_kind_of_a_run_stands_there_and_is_told_for_older_ones(settings, parameters, kind, tmp_path):
    older = {name: value for name, value in GOOD.items() if name != "kind"}
    older |= {"settings": settings, "parameters": dict.fromkeys(parameters, GOOD["parameters"]["w"])}
    for said, expected in ({}, kind), ({"kind": "finetune"}, "finetune"):
        (tmp_path / "state.json").write_text(json.dumps(older | said))
        assert state_file.kind_of(state_file.read(tmp_path / "state.json")) == expected


HUGE = 10**400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 5}, "format="), ({"format": "4"}, "format="), ({"format": None, "iteration": "x"}, "format="),
        ({"iteration": -5}, "iteration="), ({"iteration": 2**63}, "iteration="), ({"iteration": 1.5}, "iteration="),
        ({"iteration": True}, "iteration="), ({"iteration": float("inf")}, "iteration="),
        ({"iteration": "10"}, "iteration="), ({"updates": HUGE}, "updates="), ({"updates": 11}, "must not exceed"),
        ({"loss_scaler": "x"}, "loss_scaler="), ({"loss_scaler": {"scale": 1.0}}, "loss_scaler.good_steps is missing"),
        ({"loss_scaler": GOOD["loss_scaler"] | {"scale": float("nan")}}, "loss_scaler.scale="),
        ({"loss_scaler": GOOD["loss_scaler"] | {"scale": 0.0}}, "loss_scaler.scale="),
        ({"settings": None}, "settings="), ({"settings": []}, "settings="),
        ({"settings": {"global_batch_size": "x"}}, "global_batch_size"),
        ({"settings": {"global_batch_size": 0}}, "global_batch_size"),
        ({"masters": 1}, "masters="), ({"parameters": []}, "parameters="), ({"data": []}, "data="),
        ({"data": {"start": 0, "sources": []}}, "data.sources="),
        ({"data": GOOD["data"] | {"vocabulary": 5}}, "data.vocabulary="),
        ({"data": {"start": 0, "sources": 3}}, "data.sources="), ({"data": {"start": "x"}}, "data.start="),
        ({"data": {"sources": []}}, "data.start is missing"),
        ({"data": {"start": 0, "sources": [{"name": 5}]}}, "data.sources[0].name="),
        ({"data": {"start": 0, "sources": [GOOD["data"]["sources"][0] | {"weight": "1/0"}]}}, "sources[0].weight="),
        ({"data": {"start": 0, "sources": [GOOD["data"]["sources"][0] | {"consumed": "7"}]}}, "sources[0].consumed="),
        ({"data": {"start": 0, "sources": [GOOD["data"]["sources"][0] | {"weight": "1e9"}]}}, "sources[0].weight="),
        ({"parameters": {"w" * 9999: {"shape": [-1]}}}, "parameters.www"),
        ({"parameters": {"w": GOOD["parameters"]["w"] | {"view": [5]}}}, "different numbers of values"),
        ({"parameters": {"w\n\x1b[2J": 5}}, r"w\\n\\x1b\[2J"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_names_its_key(tmp_path, change, said):
    assert said.replace("\\\\", "\\").replace("\\[", "[") in refused(
        tmp_path / "state.json", json.dumps(GOOD | change).encode()
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"5", b"null", b"\xff\xfe" * 50_000, b"[" * 200_000, b'{"settings":' * 200_000,
        json.dumps(GOOD).encode()[:-9], json.dumps(GOOD).encode("utf-16"), b"9" * 100_000,
        json.dumps({"format": "x" * 100_000}).encode(),
    ],
    ids=lambda raw: repr(raw[:20]),
)  # fmt: skip
def test_what_is_no_such_file_is_a_short_error(tmp_path, raw):
    refused(tmp_path / "state.json", raw)


@pytest.mark.parametrize("key", ["format", "iteration", "settings", "parameters"])
def test_a_missing_key_is_named(tmp_path, key):
    assert f"{key} is missing" in refused(
        tmp_path / "state.json", json.dumps({k: v for k, v in GOOD.items() if k != key}).encode()
    )


def test_a_file_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(state_file, "LARGEST", 100)
    assert "more than 100 bytes" in refused(tmp_path / "state.json", json.dumps(GOOD).encode())
