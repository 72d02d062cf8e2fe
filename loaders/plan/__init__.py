from loaders.plan.plan import ROW, neutral_rows, resized_sizes
from loaders.plan.sampler import PlanSampler
