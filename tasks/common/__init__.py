"""What tasks share: their base class, sums and metrics, weights of classes, and pictures."""
