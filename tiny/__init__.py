"""Training of `builtin://tiny`: its questions, its tokenizer and the script that writes its weights. See README.md."""
