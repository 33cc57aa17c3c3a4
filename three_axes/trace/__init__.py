"""Real models on fake ranks: what one rank computes, holds and sends."""
