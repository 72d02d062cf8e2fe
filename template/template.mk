# Targets that only the template has; the Makefile of a project made from it does without this file.
.PHONY: bench parts project side-by-side

bench: .venv/ready  ## measure the loaders and the loop on this machine, beside other libraries
	$(BIN)/python -m benchmarks

side-by-side: .venv/ready  ## draw a page for your browser that shows each script beside train.py
	$(BIN)/python -m template.side_by_side

parts:  ## list the parts of a project
	@$(PYTHON) -m template.project --list

project: $(if $(SCRIPT:each=),.venv/ready)  ## make a project of your own in a new folder: make project DIR=../mine PARTS="ddp amp" SCRIPT=merged
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m template.project "$$DIR" "$$PARTS" "$$SCRIPT"
