from loaders.plan.plan import ROW, crop_shapes, neutral_rows, output_size, resized_sizes
from loaders.plan.sampler import PlanSampler
