"""Model families: configs, checkpoints, tokenizers and forward passes that never see a layout."""
