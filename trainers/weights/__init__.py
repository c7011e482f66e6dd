"""Other people's weights: what their parameters are called and how they are laid out."""
