from accelerate.test_utils.testing import *
from accelerate.test_utils.training import RegressionDataset as RegressionDataset
from accelerate.test_utils.training import RegressionModel as RegressionModel
