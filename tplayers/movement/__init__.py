"""Data movement between ranks as linear operators, each with its transposed operator for the backward."""
