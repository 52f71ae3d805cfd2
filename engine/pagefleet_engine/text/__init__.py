"""The text side of a model folder: its tokenizer, chat template, and both as data for routers."""
