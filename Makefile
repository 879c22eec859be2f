# The commands a newcomer needs. Each makes the virtual environment first; VENV=path puts it elsewhere.
VENV ?= .venv
PYTHON ?= python3
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO := 0
# Bytecode is written by the first import. If nothing may write it, each process compiles its libraries for many seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test lowest gpu-test docs

demo: $(VENV)/installed
	$(VENV)/bin/flowcredit demo

# What a change is tried with first: mathematics, config, credit, the loop and a tiny whole run.
quick: $(VENV)/installed
	$(VENV)/bin/python -m pytest -q tests/flow/maths tests/protocol/config tests/learner/credit tests/learner/loop tests/deploy/run/test_own.py

# Three at a time on two cores: tests wait for a quarter of their time.
test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m "not whole and not chaos and not cluster and not gpu" -n 3 --dist loadgroup

# The libraries' lowest versions, in an environment of their own. A bound that is too low breaks an installation in silence.
lowest: $(VENV)-lowest/installed
	$(VENV)-lowest/bin/python -m pytest -m "not whole and not chaos and not cluster and not gpu" -n 3 --dist loadgroup

gpu-test: $(VENV)/installed
	@$(VENV)/bin/python -m tests.support.worlds.devices
	$(VENV)/bin/python -m pytest -m gpu

docs: $(VENV)/documented
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/properdocs build --quiet
	@echo "the site is in site/: open site/index.html, or $(VENV)/bin/python -m http.server --directory site"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt torch uv
	$(call install,.[dev])
	touch $@

$(VENV)/documented: $(VENV)/installed
	$(call install,.[docs])
	touch $@

$(VENV)-lowest/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m tests.support.lowest $(VENV)-lowest/constraints.txt
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint $(VENV)-lowest/constraints.txt --editable '.[dev]'
	touch $@

# Beside the environment: diffusers imports torchao wherever it finds it, and most users do not have it.
$(VENV)/quantize: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --constraint constraints.txt --target $@ torchao
	touch $@

# uv installs in seconds what takes pip minutes. It does not read pip's settings, so pip goes on where uv finds no index.
define install
$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python --constraint constraints.txt --editable '$(1)' || \
    $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '$(1)'
endef
