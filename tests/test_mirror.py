"""The tests of a module are found from its name, and no folder of tests is too full to read."""

from pathlib import Path

from tests.support.running.distribution import BUSY, INDEPENDENT

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 16  # modules in a folder
PACKAGES = ("commengine", "tplayers", "trainers")

#: the modules without a test file of their own: the files that test them
TESTED_BY = {
    "commengine/calls/opening.py": ["commengine/test_communicator_life.py"],
    "commengine/calls/thread_stream.py": ["commengine/test_stream.py"],
    "commengine/copies.py": ["trainers/checks/test_replicas.py", "tplayers/fields/test_layer.py"],
    "commengine/device/clock.py": ["commengine/device/test_backends.py"],
    "commengine/device/kernel.py": ["tplayers/test_rng_dropout.py"],
    "commengine/device/staged.py": ["commengine/device/test_backends.py"],
    "commengine/device/stream.py": ["commengine/device/test_backends.py"],
    "trainers/training/holders.py": ["trainers/checkpoints/test_checkpoint_experts.py"],
    "trainers/training/routers.py": ["trainers/training/test_trainer_experts.py", "trainers/run/test_experts.py"],
    "tplayers/canonical/experts.py": ["tplayers/canonical/test_layers.py"],
    "commengine/dtypes.py": ["commengine/test_communicator_collectives.py"],
    "commengine/rollcall/watcher.py": ["commengine/rollcall/test_program.py"],
    "commengine/errors.py": ["commengine/operations/test_checks.py", "commengine/test_agreement.py"],
    "commengine/host/polling.py": ["commengine/test_stream.py", "commengine/device/test_backends.py"],
    "commengine/job_end.py": ["commengine/test_launch.py", "commengine/startup/test_forks.py"],
    "commengine/calls/failures.py": ["commengine/operations/test_checks.py"],
    **{
        f"commengine/operations/{name}.py": ["commengine/test_communicator_collectives.py"]
        for name in (
            "all_gather",
            "all_reduce",
            "all_to_all",
            "barrier",
            "broadcast",
            "gather",
            "reduce",
            "reduce_scatter",
            "scatter",
        )
    },
    "commengine/operations/uneven/all_gather_v.py": ["commengine/operations/uneven/test_rows.py"],
    "commengine/operations/uneven/all_to_all_v.py": ["commengine/operations/uneven/test_rows.py"],
    "commengine/operations/messages.py": ["commengine/test_communicator_p2p.py"],
    "commengine/shared_memory/flags.py": ["commengine/shared_memory/test_slots.py"],
    "commengine/timeout/entries.py": ["commengine/timeout/test_watcher.py"],
    "commengine/timeout/report.py": ["commengine/timeout/test_watcher.py"],
    "tplayers/checks.py": [
        "tplayers/test_embedding.py",
        "tplayers/test_cross_entropy.py",
        "tplayers/models/test_bert.py",
    ],
    "tplayers/context/blockwise.py": ["tplayers/context/test_group.py", "tplayers/context/test_chunks.py"],
    "tplayers/context/ulysses.py": ["tplayers/context/test_group.py"],
    "tplayers/dropout_kernel.py": ["tplayers/test_rng_dropout.py"],
    "tplayers/fields/conv.py": ["tplayers/fields/test_layers_drawn.py"],
    "tplayers/fields/normalise.py": ["tplayers/fields/test_norm.py"],
    "tplayers/fields/same_layer.py": ["tplayers/fields/test_layer.py"],
    "tplayers/fields/taps.py": ["tplayers/fields/test_upsample.py", "tplayers/fields/test_adaptive_pool.py"],
    "tplayers/sharding/calls.py": ["tplayers/sharding/test_functions.py"],
    "tplayers/sharding/field.py": ["tplayers/sharding/test_functions.py"],
    "tplayers/sharding/names.py": ["tplayers/sharding/test_functions.py"],
    "tplayers/sharding/parts.py": ["tplayers/sharding/test_functions.py", "tplayers/sharding/test_layers.py"],
    "tplayers/sharding/program.py": ["tplayers/sharding/test_functions.py", "tplayers/sharding/test_shard.py"],
    "tplayers/sharding/resizing.py": ["tplayers/sharding/test_functions.py", "tplayers/sharding/test_layers.py"],
    "tplayers/sharding/shapes.py": ["tplayers/sharding/test_functions.py"],
    "tplayers/sharding/step.py": ["tplayers/sharding/test_functions.py"],
    "tplayers/sharding/values.py": ["tplayers/sharding/test_functions.py"],
    "tplayers/distillation.py": ["tplayers/test_cross_entropy.py"],
    "tplayers/models/part.py": ["trainers/pipeline/test_schedule.py"],
    "tplayers/models/relative_bias.py": ["tplayers/models/test_t5.py"],
    "tplayers/attention/cross_attention.py": ["tplayers/models/test_t5.py"],
    "tplayers/generation/encoded.py": ["tplayers/models/test_t5.py"],
    "trainers/tasks/t5.py": ["trainers/test_pretrain_t5.py"],
    "trainers/settings/distillation.py": ["trainers/distillation/test_teacher.py"],
    "trainers/distillation/objective.py": ["trainers/distillation/test_teacher.py"],
    "trainers/pipeline/messages.py": ["trainers/pipeline/test_schedule.py"],
    "trainers/training/tied.py": ["trainers/pipeline/test_schedule.py"],
    "tplayers/mlp.py": ["tplayers/test_block.py"],
    "tplayers/adjoint_pair.py": ["tplayers/movement/test_operators.py", "tplayers/movement/test_halo.py"],
    "commengine/calls/meeting.py": ["tplayers/movement/test_compared.py"],
    "tplayers/models/block.py": ["tplayers/test_block.py"],
    "tplayers/models/config.py": ["tplayers/models/test_llama.py", "tplayers/test_placement_models.py"],
    "tplayers/models/transformer.py": ["tplayers/models/test_gpt.py", "tplayers/models/test_bert.py"],
    "trainers/checkpoints/disk.py": ["trainers/checkpoints/test_checkpoint_writer_failures.py"],
    "trainers/checkpoints/module_checkpoint.py": ["trainers/test_data_parallel_checkpoints.py"],
    "trainers/checkpoints/run_state.py": ["trainers/checkpoints/test_checkpoint.py"],
    "trainers/cleaning/documents.py": ["trainers/cleaning/test_filters.py", "trainers/cleaning/test_held_out.py"],
    "trainers/cleaning/settings.py": ["trainers/test_prepare_corpus.py"],
    "trainers/cleaning/summary.py": ["trainers/test_prepare_corpus.py"],
    "trainers/compare.py": ["trainers/comparison/test_compare_command.py"],
    "trainers/comparison/options.py": ["trainers/comparison/test_compare_command.py"],
    "trainers/convert.py": ["trainers/weights/test_convert.py"],
    "trainers/data/stdlib_text.py": ["trainers/test_preprocess_data.py"],
    "trainers/data/preprocessing.py": ["trainers/test_preprocess_data.py"],
    "trainers/data/vocabularies.py": ["trainers/test_preprocess_data.py"],
    "trainers/finetune.py": ["trainers/finetuning/test_command.py"],
    "trainers/finetuning/completing.py": ["trainers/finetuning/test_command.py", "trainers/test_presets.py"],
    "trainers/finetuning/settings.py": ["trainers/finetuning/test_command.py"],
    "trainers/finetuning/predict.py": ["trainers/finetuning/test_command.py"],
    "trainers/finetuning/task.py": ["trainers/finetuning/test_command.py"],
    "trainers/evaluate.py": ["trainers/scoring/test_evaluate_command.py"],
    **{
        f"trainers/megatron_flags/{name}.py": [
            "trainers/megatron_flags/test_table.py",
            "trainers/megatron_flags/test_reading.py",
        ]
        for name in ("answers", "features", "files", "machine", "model", "parsing", "training")
    },
    "trainers/run/loop.py": ["trainers/test_pretrain_gpt.py", "trainers/checkpoints/test_run_folder.py"],
    "trainers/run/report.py": [
        "trainers/run/test_metrics.py",
        "trainers/run/test_stopping.py",
        "trainers/test_pretrain_gpt.py",
    ],
    "trainers/run/task.py": ["trainers/test_pretrain_gpt.py"],
    "trainers/run/startup.py": ["trainers/test_pretrain_gpt.py"],
    "trainers/tasks/bert.py": ["trainers/test_pretrain_bert.py"],
    "trainers/tasks/gpt.py": ["trainers/test_pretrain_gpt.py", "trainers/training/test_trainer_losses_agree.py"],
    "commengine/options/declared.py": ["commengine/options/test_options.py"],
    "commengine/options/parser.py": ["commengine/options/test_options.py"],
    "commengine/options/ranges.py": ["commengine/options/test_options.py"],
    **{
        f"trainers/settings/{name}.py": ["trainers/settings/test_commands.py", "trainers/settings/test_rules.py"]
        for name in ("data", "derived", "job", "layout", "model", "precision", "same_bits", "saving", "steps")
    },
    "trainers/settings/loading.py": ["trainers/test_trained.py"],
    "trainers/settings/command.py": ["trainers/megatron_flags/test_reading.py", "trainers/test_presets.py"],
    "trainers/tasks/commands.py": ["trainers/test_pretrain_gpt.py", "trainers/test_pretrain_bert.py"],
    "trainers/tasks/fitting.py": ["trainers/settings/test_rules_context.py"],
    "trainers/tasks/kinds.py": ["trainers/test_trained.py"],
    "tplayers/formulas/experts.py": ["bench/collective_study/test_experts.py"],
    "trainers/tasks/training.py": ["trainers/test_pretrain_gpt.py"],
    "trainers/tasks/other_models.py": ["trainers/weights/test_convert.py"],
    "trainers/training/backwards.py": ["trainers/test_data_parallel_faults.py"],
    "trainers/training/layout.py": ["trainers/training/test_reduction.py"],
    "trainers/training/module_state.py": ["trainers/test_data_parallel.py", "trainers/test_data_parallel_faults.py"],
    "trainers/training/optimizer.py": ["trainers/training/test_trainer_mixed_precision.py"],
    "trainers/training/optimizer_state.py": ["trainers/test_data_parallel_checkpoints.py"],
    "trainers/training/sharded_optimizer.py": ["trainers/test_data_parallel_checkpoints.py"],
    "trainers/generation/settings.py": ["trainers/test_generate.py"],
    "trainers/weights/settings.py": ["trainers/weights/test_convert.py"],
    "trainers/weights/other_model.py": ["trainers/weights/test_hugging_face_model.py"],
    "trainers/weights/megatron_settings.py": ["trainers/weights/test_megatron.py"],
}
#: the commands of bench without a test file of their own; the rooms of bench are tested through its commands
BENCH_TESTED_BY: dict[str, list[str]] = {}
ELSEWHERE = TESTED_BY | BENCH_TESTED_BY


def own_files(module: Path) -> list[Path]:
    """The test files of the module's own name: test_<module>.py and test_<module>_<aspect>.py."""
    folder = ROOT / "tests" / module.parent
    return [*folder.glob(f"test_{module.stem}.py"), *folder.glob(f"test_{module.stem}_*.py")]


MODULES = sorted(
    path.relative_to(ROOT)
    for path in [*(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")), *(ROOT / "bench").glob("*.py")]
    if not path.name.startswith("_")
)


def test_each_modules_tests_are_found_from_its_name() -> None:
    without = [module for module in MODULES if str(module) not in ELSEWHERE and not own_files(module)]
    wanted = [f"{module}: write {Path('tests', module.parent, f'test_{module.stem}.py')}" for module in without]
    assert not wanted, "\n".join((*wanted, "or name its test files in TESTED_BY of tests/test_mirror.py"))


def test_the_table_names_what_exists_and_nothing_else() -> None:
    for name, files in ELSEWHERE.items():
        assert Path(name) in MODULES, f"{name} is in the table, and there is no such module"
        missing = [file for file in files if not (ROOT / "tests" / file).is_file()]
        assert files and not missing, f"{name}: no tests/{missing}"
        assert not own_files(Path(name)), f"{name} has a test file of its name: take it out of the table"


def test_files_that_the_distribution_of_tests_names_exist() -> None:
    assert [file for file in (*INDEPENDENT, *BUSY) if not (ROOT / file).is_file()] == []


def test_a_folder_of_tests_mirrors_one_of_the_packages() -> None:
    own = {"support", "jobs", "lab", "proof"}
    for folder in {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}:
        assert folder.parts[:1] in [(), *((name,) for name in own)] or (ROOT / folder).is_dir(), f"tests/{folder}"


def test_no_folder_of_tests_has_too_many_modules() -> None:
    for folder in {path.parent for path in (ROOT / "tests").rglob("*.py")}:
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= LARGEST, f"{folder.relative_to(ROOT)} has {len(modules)}: make rooms"
