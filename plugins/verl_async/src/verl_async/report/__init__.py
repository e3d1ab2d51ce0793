"""Layer 5: what a job shows and leaves behind: progress, metrics, summary and report."""
