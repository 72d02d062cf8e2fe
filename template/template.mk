# Targets that only the template has; the Makefile of a project made from it does without this file.
.PHONY: bench gpu-check parts project

bench: setup  ## measure this machine and draw a report, with FULL=1 at the published sizes
	$(BIN)/python -m benchmarks $(if $(FULL),full=true)

gpu-check: setup  ## check on this machine's GPUs what only they can show, within 8 minutes on one GPU, 13 on several
	$(BIN)/python -m benchmarks.gpu_check

parts:  ## list the parts of a project
	@$(PYTHON) -m template.project --list

project: $(if $(SCRIPT:each=),setup)  ## make a project of your own in a new folder: make project DIR=../mine PARTS="ddp amp" SCRIPT=merged
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m template.project "$$DIR" "$$PARTS" "$$SCRIPT"
