# Targets that only the template has; the Makefile of a project made from it does without this file.
.PHONY: bench gpu-check parts project test-bench test-merges test-projects

ci: test-merges test-projects test-bench

bench: setup  ## measure this machine and draw a report, with FULL=1 at the published sizes
	$(BIN)/python -m benchmarks $(if $(FULL),full=true)

test-bench: setup  ## run the tests of the benchmarks
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile benchmarks/tests

gpu-check: setup  ## check on this machine's GPUs what only they can show, within 8 minutes on one GPU, 13 on several
	$(BIN)/python -m benchmarks.gpu_check

test-merges: setup  ## run, of the slow tests, the merges of all techniques and the exact resume
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile -m slow \
		tests/test_side_by_side.py tests/faults/test_exact_resume.py

test-projects: setup  ## make the core and one other project, by the day, and run their tests
	$(BIN)/python -m pytest -s template/tests/own_tests.py

parts:  ## list the parts of a project
	@$(PYTHON) -m template.project --list

project: $(if $(SCRIPT:each=),setup)  ## make a project of your own in a new folder: make project DIR=../mine PARTS="ddp amp" SCRIPT=merged
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m template.project "$$DIR" "$$PARTS" "$$SCRIPT"
