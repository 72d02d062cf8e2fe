from loaders.plan.description import describe, warn
from loaders.plan.plan import ROW, PlanSampler, neutral_rows, resized_sizes
