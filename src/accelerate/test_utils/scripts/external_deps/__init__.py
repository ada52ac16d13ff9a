"""Scripts that stand for trainings with other libraries; what those would download is made in place."""
