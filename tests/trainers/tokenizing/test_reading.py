"""A tokenizer with the files beside it is that of ``AutoTokenizer``: drawn folders, and known ids."""

import io
import json
import random
import shutil

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from commengine import Communicator, ProcessGrid
from tests.support.tokenizers.comparing import compare
from tests.support.tokenizers.drawing import MODELS, draw_folder
from tests.support.tokenizers.harness import differences, greedy_differences, has_model, make_model
from trainers import generate
from trainers.data.tokenizer import Tokenizer
from trainers.trained import load_trained

DRAWN = 10
CHAT = ["<s>", "the", "cat", "<", "u", "|", ">", "<|u|>", "<|endoftext|>", "<|im_end|>", "<unk>"]


@pytest.fixture
def write(tmp_path):
    """``write(name=content)``: files of a folder, dots in place of double underscores."""

    def made(folder="folder", **files):
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (place / name.replace("__", ".")).write_text(text, encoding="utf-8")
        return place

    return made


def words(vocabulary, start=None):
    """A tokenizer.json of words and letters, with the special tokens of ``CHAT``."""
    found = tokenizers.Tokenizer(models.WordLevel({token: n for n, token in enumerate(vocabulary)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(tokenizers.Regex(r"[<>|]|\w+"), "isolated")]
    )
    found.add_special_tokens([token for token in vocabulary if token.startswith("<") and len(token) > 1])
    if start is not None:
        found.post_processor = processors.TemplateProcessing(f"{start} $A", None, [(start, vocabulary.index(start))])
    return found.to_str()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_drawn_folders_are_read_as_transformers_reads_them(tmp_path, monkeypatch):
    """More of them by ``python -m tests.trainers.tokenizing.drawn``."""
    pytest.importorskip("transformers", minversion="5")
    seed, found = random.randrange(10**6), []
    for number in range(DRAWN):
        draw_folder(seed, number, tmp_path / str(number))
        found.append(compare(tmp_path / str(number)))
        assert found[-1][0] != "wrong", f"--seed {seed} --only {number}: {found[-1][1]}"
    assert sum(result == "equal" for result, _ in found) >= DRAWN // 2


@pytest.mark.parametrize("number", [3, 290])  # a file read as it is, and a class that builds its own
def test_a_special_token_added_again_without_its_flag_is_written_as_it_is_read(number, tmp_path):
    pytest.importorskip("transformers", minversion="5")
    draw_folder(61373, number, tmp_path / "one")
    assert compare(tmp_path / "one")[0] == "equal"


def test_a_t5_has_the_characters_of_its_file(tmp_path):
    pytest.importorskip("transformers", minversion="5")
    assert draw_folder(3, 49, tmp_path / "one").endswith("t5 -")
    assert "precompiled_charsmap" in (tmp_path / "one" / "tokenizer.json").read_text()
    assert compare(tmp_path / "one")[0] == "equal"


def test_marks_of_a_chat_and_the_beginning_of_a_text_are_tokens(write):
    folder = write(tokenizer__json=words(CHAT, "<s>"), tokenizer_config__json={"eos_token": "<|im_end|>"})
    found = Tokenizer.from_file(folder / "tokenizer.json")
    assert found.encode_around("<|u|>the cat") == [0, 7, 1, 2]
    assert found.encode("<|u|>the cat") == [3, 5, 4, 5, 6, 1, 2]  # of a corpus: no document ends itself


def test_the_end_of_a_text_is_the_one_that_the_files_name(write):
    folder = write(tokenizer__json=words(CHAT), tokenizer_config__json={"eos_token": "<|im_end|>"})
    found = Tokenizer.from_file(folder / "tokenizer.json")
    assert (found.end_token, found.eod, found.start_token) == ("<|im_end|>", 9, "<|im_end|>")
    write(special_tokens_map__json={"bos_token": "<s>", "eos_token": {"content": "<|u|>", "lstrip": True}})
    found = Tokenizer.from_file(folder / "tokenizer.json")
    assert (found.end_token, found.start_token, found.encode_around("the <|u|>")) == ("<|u|>", "<s>", [1, 7])
    write(special_tokens_map__json={}, tokenizer_config__json={"pad_token": "<s>"})
    none = Tokenizer.from_file(folder / "tokenizer.json")  # nothing is guessed, though <|endoftext|> is there
    assert none.end_token is None and none.start_token is None
    with pytest.raises(ValueError, match="name no eos_token"):
        _ = none.eod
    alone = write("alone", tokenizer__json=words(CHAT))
    assert Tokenizer.from_file(alone / "tokenizer.json").end_token == "<|endoftext|>"
    write("alone", config__json={"model_type": "llama", "eos_token_id": [9, 7]})
    assert Tokenizer.from_file(alone / "tokenizer.json").end_token == "<|im_end|>"


def test_what_the_files_say_goes_with_a_tokenizer(write, tmp_path):
    """Beside PREFIX-tokenizer.json, as preprocess_data writes it; a file of another name is taken by itself."""
    said = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}", "split_special_tokens": True}
    folder = write(tokenizer__json=words(CHAT), tokenizer_config__json=said)
    found = Tokenizer.from_file(folder / "tokenizer.json")
    (folder / "a-b-tokenizer.json").write_bytes(found.to_bytes())
    (folder / "a-b-tokenizer_config.json").write_text(json.dumps(found.settings()))
    again = Tokenizer.from_file(folder / "a-b-tokenizer.json")
    assert again.settings() == found.settings() and again.end_token == "<|im_end|>"
    assert again.encode_around("<|u|>the") == found.encode_around("<|u|>the") == found.encode("<|u|>the")
    shutil.copy(folder / "tokenizer.json", folder / "other.json")
    assert Tokenizer.from_file(folder / "other.json").settings() is None


@pytest.mark.parametrize(
    "said",
    [{"chat_template": 3}, {"chat_template": False}, {"chat_template": [{"name": "a"}]}, {"eos_token": "\ud800"},
     {"eos_token": 5}, {"extra_special_tokens": 5}, {"bos_token": {"content": "<s>"}},
     {"extra_special_tokens": {"a": 1}}, {"padding_side": {}, "eos_token": ["a"]}],
)  # fmt: skip
def test_a_value_of_another_type_is_one_error_that_names_the_file(write, said):
    folder = write(tokenizer__json=words(CHAT), tokenizer_config__json=said, added_tokens__json={"<y>": 11})
    with pytest.raises(ValueError) as caught:
        Tokenizer.from_file(folder / "tokenizer.json")
    assert str(caught.value).startswith(f"{folder}/tokenizer") and "\n" not in str(caught.value)


@pytest.fixture
def llama(write):
    """A random Llama whose tokenizer puts <s> before a text, and whose files name several end tokens."""
    pytest.importorskip("transformers", minversion="5")
    config = {"model_type": "llama", "vocab_size": len(CHAT), "eos_token_id": 8} | MODELS["llama"]
    folder = write(
        tokenizer__json=words(CHAT, "<s>"), config__json=config, generation_config__json={"eos_token_id": [8, 9]},
        tokenizer_config__json={"bos_token": "<s>", "eos_token": "<|im_end|>"},
    )  # fmt: skip
    make_model(folder, 3)
    return folder


@pytest.fixture
def alone():
    import mpi4py.MPI as MPI

    with Communicator(MPI.COMM_SELF, device="cpu") as world:
        yield world


@pytest.mark.slow
def test_greedy_texts_and_conversations_are_those_of_transformers(llama, alone, capsys, monkeypatch):
    """With several end tokens, and with one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert list(greedy_differences(llama, alone)) == []
    with ProcessGrid(alone, tensor=1) as grid:
        trained = load_trained(f"hf:{llama}", grid)
        assert len(trained.end_tokens) > 1
        monkeypatch.setattr("sys.stdin", io.StringIO("<|u|>the cat\n"))
        config = generate.GenerateSettings(load="x", interactive=True, temperature=0.0, max_new_tokens=12)
        capsys.readouterr()
        assert generate._converse(config, grid, trained) == 0
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    given = tokenizer("<|u|>the cat", return_tensors="pt")
    whole = theirs.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    kept = whole[:-1] if whole[-1] in trained.end_tokens else whole
    said = tokenizer.decode(kept).removeprefix(tokenizer.decode(given["input_ids"][0]))
    assert capsys.readouterr().out == f"{said}\n" and said.strip()
    (llama / "generation_config.json").unlink()
    assert list(greedy_differences(llama, alone)) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_harness_gives_the_same_numbers_on_drawn_folders(tmp_path, alone):
    pytest.importorskip("lm_eval")
    done, number = 0, 0
    while done < 3:
        folder, number = tmp_path / str(number), number + 1
        draw_folder(11, number, folder)
        if compare(folder)[0] == "equal" and has_model(folder):
            make_model(folder, number)
            assert list(differences(folder, alone)) == [], number
            done += 1
