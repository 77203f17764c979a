"""Translation: parallel text, vocabularies, experiments, training, search, scoring, alignment, and the demo."""
