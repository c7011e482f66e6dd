"""Fine-tuning: the files, samples, measures and predictions of MNLI, QQP, SQuAD and RACE (paper, section 5.3)."""
