IMAGE ?= registry.example.com/distributed-training-template:latest
image:  ## build the container image IMAGE that launch/trainjob.yaml names; TORCH_INDEX=URL: for another CUDA
	docker build --tag $(IMAGE) --build-arg TORCH_INDEX=$(TORCH_INDEX) .

.PHONY: image
