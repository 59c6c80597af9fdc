"""A run's figures in other people's trackers: TensorBoard, MLflow, trackio, Weights & Biases."""

from lamella.track.tracking import Tracking as Tracking
from lamella.track.tracking import check_installed as check_installed
