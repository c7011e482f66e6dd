"""Command lines and YAML files, nonsense first and then at random, given to every command of the project."""

from tests.support.faults import drawing
from tests.support.faults.commands import ACCEPTED, COMMANDS, here, job
from tests.support.faults.parts import Case

TITLE = "random command lines and YAML files, all commands"
DEMAND = "status 2 and one short line that names an option or a file, or a run; no nonsense is accepted"
CASES = 2000
LIMIT_S = 120.0
#: every case of a whole number of these goes through mpiexec, if its command has ranks
JOBS = 7

GPT, BERT, STEP = "trainers.pretrain_gpt", "trainers.pretrain_bert", "bench.step"
FIT, REPORT = "bench.study --only fit", "bench.study --only report"
DATA, CORPUS = "trainers.preprocess_data", "trainers.prepare_corpus"
BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9)) + "split: *a8\n"

#: What must be refused, after a command's base words: facts of a review first. A text stands for a file of --config.
NONSENSE: list[tuple[str, list[str] | str]] = [
    *((GPT, [f"--{name}=--"]) for name in ("save", "load", "split", "data-path", "lr", "device", "preset", "config")),
    *((DATA, [f"--{name}=--"]) for name in ("json-key", "lang", "tokenizer-model", "input", "workers")),
    *((CORPUS, [f"--{name}=--"]) for name in ("json-key", "languages", "work-dir", "jaccard")),
    *((name, ["--output=--"]) for name in COMMANDS if name.startswith("bench.") and name != STEP),
    (GPT, "3: 4\n"), (GPT, "true: 1\n"), (GPT, "null: 1\n"), (GPT, "bf16: [true]\n"), (GPT, "bf16: {a: b}\n"),
    (GPT, ["--tokenizer-model", ""]), (GPT, ["--save", ""]), (GPT, ["--load", ""]), (GPT, ["--data-path", ""]),
    (GPT, ["--tensorboard-dir", ""]), (BERT, ["--vocab-file", ""]), (DATA, ["--tokenizer-model", ""]),
    (DATA, ["--train-bpe", str(2**63)]), (DATA, ["--train-bpe", str(10**12)]), (DATA, ["--train-bpe", "0"]),
    (DATA, ["--train-wordpiece", str(2**64)]), (DATA, ["--workers", str(2**40)]), (DATA, ["--lang", "klingon"]),
    (DATA, ["--vocab-file", "text.txt", "--train-bpe", "300"]),
    ("bench.contest step", ["--vocab-size", "0"]), ("bench.contest step", ["--num-attention-heads", "7"]),
    ("bench.contest step", ["--hidden-size", str(10**9)]), ("bench.contest step", ["--lr", "nan"]),
    *((GPT, ["--split", split]) for split in ("1e99999999,1", "a", "0,0,0", "1,-1", "nan,1", "1,1,1,1", "1,,1")),
    (GPT, BOMB), (GPT, "split: [" + "a, " * 60_000 + "a]\n"),
    ("bench.collectives", ["--step-factor", "1.0000001"]), ("bench.collectives", ["--step-factor", "1"]),
    ("bench.collectives", ["--confidence", "2"]), ("bench.collectives", ["--confidence", "0"]),
    ("bench.collectives", ["--max-bytes", "1000T"]), ("bench.collectives", ["--confidence", "2"]),
    (GPT, "lr: 0.1\nlr: 0.2\n"), (GPT, "config: other.yaml\n"), (GPT, "lr: [0.1]\n"), (GPT, "- lr\n"), (GPT, "lr\n"),
    (GPT, "lr: !!python/object/apply:os.system ['true']\n"), (GPT, "lr: &x 1\nmin-lr: *x\n"),
    (GPT, ["--device", "cpu:5"]), (GPT, ["--device", "tpu"]), (GPT, ["--device", "cuda:-1"]),
    (GPT, ["--lr-warmup-iters", "20", "--lr-decay-iters", "10"]), (GPT, ["--min-lr", "1", "--lr", "0.1"]),
    *((GPT, [f"--config={name}"]) for name in ("pipe", "/dev/zero", "huge", "loop", "binary", ".", "missing", "empty")),
    *((DATA, ["--overwrite", "--input", name]) for name in ("pipe", "/dev/zero", "loop", "binary", "missing", "empty")),
    *((GPT, ["--tokenizer-model", name]) for name in ("pipe", "/dev/zero", "huge", "binary", "empty", ".", "text.txt")),
    *((BERT, ["--vocab-file", name]) for name in ("pipe", "/dev/zero", "binary", "empty", "tokenizer.json")),
    *((name, ["--output", "pipe"]) for name in (FIT, REPORT, "bench.predict", "bench.collectives")),
    ("bench.predict", ["--cluster", "pipe"]), ("bench.predict", ["--cluster", "/dev/zero"]),
    *((GPT, [f"--{name}", "1000000000000"]) for name in (
        "hidden-size", "num-layers", "seq-length", "vocab-size", "micro-batch-size", "ffn-hidden-size", "sample-tokens",
        "max-position-embeddings", "make-vocab-size-divisible-by", "num-attention-heads",
    )),
    (GPT, ["--hidden-size", str(2**20), "--num-layers", "1000"]),
    (GPT, ["--vocab-size", str(2**24), "--hidden-size", "8192"]),
    *((GPT, [f"--{name}", "nan"]) for name in ("lr", "adam-eps", "clip-grad", "weight-decay", "init-method-std")),
    *((GPT, [f"--{name}", "inf"]) for name in ("lr", "distributed-timeout-minutes", "clip-grad")),
    (GPT, ["--seed=-1"]), (GPT, ["--adam-beta1", "1"]), (GPT, ["--hidden-dropout", "1"]), (GPT, ["--bf16", "--fp16"]),
    (BERT, ["--mask-prob", "0"]), (BERT, ["--seq-length", "4"]), (BERT, ["--mask-prob", "2"]),
    (BERT, ["--vocab-size", "5"]),
    (GPT, ["--micro-batch-size", "3"]), (GPT, ["--num-attention-heads", "3"]), (GPT, ["--train-iters", str(10**30)]),
    (GPT, ["--verify-data"]), (GPT, ["--preset", "bert-336m"]),
    (CORPUS, ["--jaccard", "0.1"]), (CORPUS, ["--buffer-megabytes", str(10**9)]), (CORPUS, ["--languages", "klingon"]),
    (CORPUS, ["--decontaminate", "empty"]), (CORPUS, ["--output", "rows.jsonl"]), (CORPUS, ["--work-dir", "missing"]),
    *(("trainers.supervise", ["--ranks", ranks]) for ranks in ("1,2", "2,2", "0", "x", "2:3", "2:1,1", "3,1", "")),
    *(("trainers.supervise", ["--hosts", hosts]) for hosts in ("", "a:2", "a:0", "a b")),
    ("trainers.supervise", ["--probe", "'{host}"]), ("trainers.supervise", ["--repeats", "0"]),
    ("trainers.supervise", ["--back-off", "nan"]), ("trainers.supervise", ["--start-minutes", "0"]),
    (FIT, ["--statistic", "mode"]), (FIT, ["--plot", "a.exe"]), (FIT, ["--output", "missing/x"]),
    ("bench.collectives", ["--over", "nccl"]), ("bench.collectives", ["--min-bytes", "9" * 400]),
    ("bench.predict", ["--gpus", "0"]), ("bench.predict", ["--hidden-size", str(10**12)]),
    ("bench.predict", ["--hidden-dropout", "nan"]),
    ("bench.collectives --only switch-points", ["--margin", "0"]),
    ("bench.collectives --only switch-points", ["--json", "binary"]),
    ("bench.contest mechanisms", ["--rate", "inf"]), ("bench.collectives --only overhead", ["--rounds", "1"]),
    ("bench.gpu", ["--without", "none"]), (STEP, ["--steps", "0"]), (STEP, ["--model", "t5"]),
]  # fmt: skip
SHORT = [*range(0, len(NONSENSE), 12), *range(len(NONSENSE) + 1, CASES, 150)]


def run(case: Case) -> str:
    folder = case.folder / "work"
    drawing.fixtures(folder)
    name, words, never = drawn(case)
    through = job if case.number % JOBS == 0 and case.number >= len(NONSENSE) and COMMANDS[name].ranks else here
    if through is job:  # the kernel takes no word of 128 KB
        words = [word for word in words if len(word) < 100_000]
    try:
        outcome = through(name, words, folder)
        assert not (never and outcome == ACCEPTED), "nonsense was accepted"
    except AssertionError as error:
        raise AssertionError(f"{error} [{name} {' '.join(words)[-400:]}]") from error
    return f"{outcome} under mpiexec" if through is job else outcome


def drawn(case: Case) -> tuple[str, list[str], bool]:
    """The command, its words, and whether it must refuse them. It may write a file into the case's folder."""
    file = case.folder / "drawn.yaml"
    if case.number < len(NONSENSE):
        name, extra = NONSENSE[case.number]
        base = list(COMMANDS[name].base)
        if isinstance(extra, str):
            file.write_text(extra)
            return name, [*base, "--config", str(file)], True
        return name, base + extra, True
    draw = case.random
    name = draw.choice(list(COMMANDS))
    base, options = list(COMMANDS[name].base), drawing.options_of(COMMANDS[name].parser())
    if draw.random() < 0.35:
        file.write_bytes(drawing.yaml_text(options, draw))
        return name, [*base, "--config", str(file)], False
    return name, *drawing.line(base, options, draw)
