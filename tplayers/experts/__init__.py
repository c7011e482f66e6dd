"""A mixture of experts in place of a layer's feed-forward block: routing, the losses of a router, and the experts."""
