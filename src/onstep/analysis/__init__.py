"""What can be read from the journal of a run. No torch in here."""

from onstep.analysis.loss_plot import plot_loss

__all__ = ["plot_loss"]
