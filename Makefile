# megatron.c: `make deps demo` shows it at work, `make help` lists the targets.
#
## make               build train, infer and data/preprocess (the first time: look for libraries)
## make deps          install the distribution's packages that it uses
## make demo          prepare text, train a small Llama on it, draw its loss and generate text
## make demo-rl       teach a small model to sort digits by reinforcement learning (about two minutes);
##                    on a GPU a larger one: MODEL=gpt2-124m DEVICE=cuda
## make demo-agent    teach a small model to use a calculator (some minutes)
## make demo-vision   teach a small model to name colours and places in pictures, as a page (about three minutes)
## make test          run the quick tests (all but those of tests/slow_suites); SUITES="tokenizer options" runs some,
##                    SECTIONS="9d 3e" those of these sections of megatron.c without their long tests,
##                    ONLY=name one test by its name or pattern
## make times         print how long the suites took here when they ran last
## make needs EXAMPLE=focal_loss  print the files that an example needs, for a copy of its own
## make test-all      run all tests;  make test-slow: the rest alone
## make kernels       build notes/examples/kernels.cu, a softmax and a matrix product on a GPU in four steps each
## make examples      build the programs that the commands of the chapters run: train, mini and notes/examples
## make mini          build notes/mini.c, every parallelism in one file, as build/default/notes/mini; and its steps
## make install       PREFIX=/usr/local DESTDIR=: install programs, headers, libraries, megatron.pc;  make uninstall
## make manual        man pages and bash completions of train and infer, from the table of options
## make trace         draw two steps of RANKS=4 ranks as OUT=build/trace.html; OPTIONS="..." of train or TRACE=FILE.json
## make plot RUN=F    draw the curves of metrics files (RUN=a.jsonl,b.jsonl) as a.svg or OUT=FILE.svg|.png
## make pictures      draw the pictures of the notes
## make book          README, chapters and pictures as pages in build/book, with one that draws pipeline schedules
## make puzzle N=1    build notes/mini.c with an error to find: N=1 to 10, notes/00-megatron-in-one-file.md
## make notes         write the code that the notes quote, and the table of CONTRIBUTING.md, from the sources again
## make bench         run the benchmarks
## make bench-gpu     measure the GPU's operations, attention and training beside other programs; takes minutes
## make calibrate     measure this machine's GPUs for train --plan: OUT=machine.json, BASE=data/machines/h200.json
## make bench-bitwise  measure what --bitwise-rollouts costs on the CPU
## make bench-experts  measure a layer of experts on the GPU against its matrix products alone
## make bench-fp8     train a small model in bf16 and with every fp8 recipe, compare losses; DEVICE=cuda STEPS=n
## make bench-checkpoint  saving and loading against dd, on 1 and 4 ranks and on a GPU; FOLDER=build/checkpoint
## make fuzz          look for crashes in the parsers; FUZZ_SECONDS=600 TARGET=name
## make fire          requests to a server by clients of all kinds; REQUESTS=20000 CLIENTS=200
## make fuzz-layouts  train random models on random layouts, compare with one rank; SECONDS=600 SEED=1 NUMBER=n;
##                    on GPUs DEVICE=cuda RANKS=4; STAGE=rl: reinforcement learning alone
## make lint          check the project's rules;  make format: format the code;  make format-check: check its format
## make sizes         print the lines of every source file, and the number and length of its functions
## make probe         look for libraries again
## make clean         remove what was built
##
## Settings: OPT="-O2" CC=clang WITHOUT="mpi blas" (do without libraries) SANITIZE=1 (check memory) WERROR=1 V=1
## DRAFT=1 compiles in half of the time, for a quick test, in a folder of its own.
## CUDA is compiled for the GPU of this machine; CUDA_ARCH=90a or CUDA_ARCH="80 90a" compiles it where there is none.
## RANKS=N: ranks of the demos; by default as many as cores, up to four.
## All cores compile, unless -j says otherwise.

ifeq ($(origin CC),default)
CC := $(if $(shell command -v gcc),gcc,cc)
endif
DEFAULT_CC := $(if $(filter gcc cc,$(notdir $(CC))),,$(notdir $(lastword $(CC))))
Q := $(if $(V),,@)

# All cores compile. A make that is started by another one shares that one's jobs.
ifeq ($(MAKELEVEL)$(filter -j% --jobs%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(or $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null),1)
endif

# ---- One build directory for each configuration, so that builds do not share objects ---------------------------------

comma := ,
space := $(subst ,, )
CONFIG := $(subst $(space),-,$(strip $(DEFAULT_CC) $(if $(FUZZER),fuzzer) $(if $(SANITIZE),sanitize) \
	$(if $(DRAFT),draft) $(if $(strip $(WITHOUT)),without $(sort $(WITHOUT)))))
B := build/$(or $(CONFIG),default)
BIN := $(if $(CONFIG),$(B)/bin/)

LIBRARIES := mpi blas openmp dnnl jansson yaml pcre2 utf8proc http png jpeg cmocka cuda nccl cudnn gnuplot
ifneq ($(filter-out $(LIBRARIES),$(WITHOUT)),)
$(error WITHOUT=$(WITHOUT): the libraries are $(LIBRARIES))
endif

# ---- Sources ---------------------------------------------------------------------------------------------------------

MAINS := $(wildcard train.c infer.c data/datasets/preprocess.c)
LIBRARY := $(filter-out $(MAINS),megatron.c $(wildcard data/*/*.c))
ALL_SUITES := $(sort $(patsubst tests/test_%,%,$(basename $(wildcard tests/test_*.c tests/test_*.sh))))
SLOW_SUITES := $(shell sed -n 's/^\([a-z0-9_]*\) .*/\1/p' tests/slow_suites 2>/dev/null)
ifneq ($(SECTIONS),)
SUITES := $(shell tests/sections $(SECTIONS))
$(if $(SUITES),,$(error SECTIONS=$(SECTIONS): no suite tests them))
else
SUITES ?= $(filter-out $(SLOW_SUITES),$(ALL_SUITES))
endif
TESTS = $(if $(HAVE_CMOCKA),$(filter-out $(if $(HAVE_MPI),,%_mpi.c %_mpi8.c),$(wildcard $(SUITES:%=tests/test_%.c))))
BENCHES := $(wildcard tests/bench_*.c)
FUZZERS := $(if $(TARGET),tests/fuzz_$(TARGET).c,$(filter-out %/fuzz_layouts.c,$(wildcard tests/fuzz_*.c)))

PROGRAM_NAMES := $(patsubst data/datasets/%,data/%,$(MAINS:%.c=%))
PROGRAMS := $(PROGRAM_NAMES:%=$(BIN)%)
TEST_PROGRAMS = $(TESTS:%.c=$(B)/%)
ALL_TEST_PROGRAMS = $(patsubst %.c,$(B)/%,$(if $(HAVE_CMOCKA),$(filter-out $(if $(HAVE_MPI),,%_mpi.c %_mpi8.c),\
	$(wildcard $(ALL_SUITES:%=tests/test_%.c)))))
BENCH_PROGRAMS := $(BENCHES:%.c=$(B)/%)
FUZZ_PROGRAMS := $(FUZZERS:%.c=$(B)/%)
FUZZ_LAYOUTS := $(B)/tests/fuzz_layouts
EXAMPLE_PROGRAMS := $(patsubst %.c,$(B)/%,$(wildcard notes/examples/*.c))
DRAW := $(if $(wildcard notes/draw.c),$(B)/notes/draw)
MPICC ?= mpicc
MINI_PROGRAMS := $(patsubst %.c,$(B)/%,notes/mini.c $(wildcard notes/steps/*.c))
KERNELS := $(B)/notes/examples/kernels
MINI = $(if $(HAVE_MPI),$(if $(shell command -v $(MPICC)),$(B)/notes/mini))
CRASH_SHIM := $(if $(wildcard tests/crash_shim.c),$(B)/tests/crash_shim.so)
OBJECTS := $(LIBRARY:%.c=$(B)/%.o) $(if $(SANITIZE)$(FUZZER),$(B)/tests/never_unload.o)
# Objects that no include leads to, in every program.
MORE_OBJECTS = $(filter-out $(LIBRARY:%.c=$(B)/%.o),$(OBJECTS))

# ---- Flags -----------------------------------------------------------------------------------------------------------

OPT ?= $(if $(SANITIZE)$(FUZZER),-O1,$(if $(DRAFT),-O2 $(DRAFT_VECTORS),-O3)) -march=native
# Half of the time of -O3; loops are vectorized all the same, as sums in fp32 need it for their accuracy. With these
# options gcc warns of a length that it thinks negative.
DRAFT_VECTORS = $(if $(findstring clang,$(CC)),,-ftree-vectorize -fvect-cost-model=dynamic -Wno-stringop-overflow)
# Where a variable is at each instruction takes a fifth of the compiler's time, and changes no instruction.
DEBUG := -g -fno-var-tracking
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror)
CHECKS := $(if $(FUZZER),-fsanitize=fuzzer-no-link) \
	$(if $(SANITIZE)$(FUZZER),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
# Floating point: no errno, no traps, and a*b+c may be one instruction. No -ffast-math, which reorders sums.
MATHS := -fno-math-errno -fno-trapping-math -ffp-contract=fast -fopenmp-simd

.PHONY: test-all test-slow mini kernels examples has-mpicc has-nvcc has-pandoc
.PHONY: all help everything library manual install uninstall test bench bench-gpu bench-experts bench-checkpoint fuzz
.PHONY: calibrate bench-bitwise bench-fp8 needs times
.PHONY: fire fuzz-programs fuzz-layouts plot trace pictures book notes puzzle demo demo-rl deps deps-dev probe lint \
	sizes demo-agent demo-vision format format-check clean FORCE
all:

# Several goals are made one after another, each by a make of its own: `make deps test` looks for libraries after they
# are installed, and `make clean all` builds after it has removed.
ifneq ($(word 2,$(MAKECMDGOALS)),)
.PHONY: $(MAKECMDGOALS)
$(firstword $(MAKECMDGOALS)):
	+@for goal in $(MAKECMDGOALS); do $(MAKE) --no-print-directory $$goal || exit 1; done
$(filter-out $(firstword $(MAKECMDGOALS)),$(MAKECMDGOALS)): $(firstword $(MAKECMDGOALS))
	@:
else

# ---- What the machine has (data/scripts/probe.sh), unless nothing is compiled ----------------------------------------

COMPILES := $(filter-out help notes puzzle mini kernels clean deps deps-dev lint sizes format format-check plot probe \
	fuzz test-all test-slow uninstall needs times \
	$(if $(filter book,$(MAKECMDGOALS)),$(if $(shell command -v pandoc),,book)),$(or $(MAKECMDGOALS),all))
ifneq ($(COMPILES),)
include $(B)/config.mk
endif

# CUDA is compiled for CUDA_ARCH, or else for the GPU that answers here. With the newest of them comes its PTX, which
# the driver compiles for newer GPUs; 75-virtual is PTX alone. wgmma and TMA need 90a. Kernels need 75.
ifneq ($(and $(COMPILES),$(wildcard $(B)/config.mk),$(if $(filter cuda,$(WITHOUT)),,yes)),)
OLD_ARCH := $(filter 3% 5% 6% 70% 72%,$(CUDA_ARCH))
$(if $(OLD_ARCH),$(error CUDA_ARCH=$(CUDA_ARCH): GPUs below compute capability 7.5 are not supported; leave out \
	$(OLD_ARCH), or build for the CPU without CUDA_ARCH))
GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9.]*' | sort -u)
OLD_GPUS := $(filter 3.% 5.% 6.% 7.0 7.2,$(GPUS))
GPU_ARCH := $(subst .,,$(filter-out $(OLD_GPUS),$(GPUS)))
ifeq ($(CUDA_ARCH)$(COUNTING)$(if $(OLD_GPUS),,none),)
$(info a GPU of compute capability $(OLD_GPUS) is not supported: building for \
	$(or $(GPU_ARCH:%=CUDA_ARCH=%),the CPU; CUDA_ARCH=90a builds for other GPUs))
endif
endif
ifneq ($(and $(HAVE_CUDA),$(wildcard cuda/*.cu)),)
ARCHS := $(patsubst 90,90a,$(or $(CUDA_ARCH),$(GPU_ARCH)))
else ifneq ($(and $(CUDA_ARCH),$(COMPILES),$(wildcard $(B)/config.mk)),)
$(if $(filter cuda,$(WITHOUT)),,$(error CUDA_ARCH=$(CUDA_ARCH): nvcc was not found; NVCC=... or CUDA_HOME=... \
	names its place; then make probe))
endif
ifneq ($(ARCHS),)
OBJECTS += $(patsubst %.cu,$(B)/%.cu.o,$(wildcard cuda/*.cu))
CUDA_DEFINES := -DMT_HAVE_CUDA $(if $(filter 90a,$(ARCHS)),-DMT_HAVE_SM90A) \
	$(if $(HAVE_NCCL),-DMT_HAVE_NCCL) $(if $(HAVE_CUDNN),-DMT_HAVE_CUDNN)
CUDA_LINK := $(NCCL_LIBS) $(CUDNN_LIBS) $(CUDA_LIBS)
CUDA_EXAMPLES := $(filter-out $(KERNELS),$(patsubst %.cu,$(B)/%,$(wildcard notes/examples/*.cu)))
endif

ALL_CFLAGS := -std=c11 -D_GNU_SOURCE -pthread -I. -I$(B) $(OPT) $(DEBUG) $(WARNINGS) $(MATHS) $(CHECKS) \
	$(FOUND_CFLAGS) $(if $(CUDA_DEFINES),$(CUDA_CFLAGS) $(CUDA_DEFINES)) $(CFLAGS)
REAL_ARCHS := $(filter-out %-virtual,$(ARCHS))
NEWEST_ARCH := $(shell printf '%s\n' $(filter-out %a,$(REAL_ARCHS)) | sort -n | tail -n 1)
PTX_ARCHS := $(sort $(patsubst %-virtual,%,$(filter %-virtual,$(ARCHS))) $(NEWEST_ARCH))
ALL_NVCCFLAGS := -std=c++17 -O3 -lineinfo -Xcompiler -fPIC \
	$(foreach a,$(REAL_ARCHS),-gencode=arch=compute_$a,code=sm_$a) \
	$(foreach a,$(PTX_ARCHS),-gencode=arch=compute_$a,code=compute_$a) -I. \
	$(CUDA_DEFINES) $(if $(WERROR),-Werror all-warnings) $(NVCCFLAGS)
ALL_FLAGS = $(ALL_CFLAGS) $(ALL_NVCCFLAGS) $(ALL_LIBS)
ALL_LIBS := $(CHECKS) $(if $(CHECKS),-rdynamic) $(LDFLAGS) $(FOUND_LIBS) $(CUDA_LINK) -pthread -lm

# These two files are written only when their contents change; then everything that depends on them is built again. The
# + makes a dry run write them too, so that it counts correctly (below).
$(B)/compiler: FORCE
	+@mkdir -p $(@D); $(CC) --version 2>&1 | head -n 1 >$@.new; cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(B)/flags: FORCE
	+@mkdir -p $(@D); echo '$(ALL_FLAGS)' >$@.new; cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(B)/config.mk: Makefile data/scripts/probe.sh $(B)/compiler
	@CC='$(CC)' WITHOUT='$(WITHOUT)' CUDA_ARCH='$(CUDA_ARCH)' data/scripts/probe.sh $@

# A line for each file that is built: "[3/25] CC train.c". A dry run counts them first.
ifeq ($(V)$(COUNTING),)
ifneq ($(and $(COMPILES),$(wildcard $(B)/config.mk)),)
TOTAL := $(shell MAKEFLAGS= $(MAKE) -n COUNTING=1 $(MAKEOVERRIDES) $(MAKECMDGOALS) 2>/dev/null | grep -c 'echo "\[')
endif
endif
progress = $(if $(V),:,$(eval BUILT += x)echo "[$(words $(BUILT))$(TOTAL:%=/%)] $1")

# ---- Programs --------------------------------------------------------------------------------------------------------

all: $(OBJECTS) $(PROGRAMS)
everything: all $(ALL_TEST_PROGRAMS) $(CRASH_SHIM) $(BENCH_PROGRAMS) $(EXAMPLE_PROGRAMS) $(CUDA_EXAMPLES) \
	$(if $(ARCHS),$(KERNELS)) $(if $(MINI),$(MINI_PROGRAMS)) $(DRAW) $(FUZZ_LAYOUTS) $(FUZZERS:%.c=$(B)/%.o)

define link_program
@mkdir -p $(@D); $(call progress,LD $@)
$(Q)$(CC) $(filter %.o,$^) -o $@ $1 $(ALL_LIBS)
endef

$(filter-out $(BIN)data/%,$(PROGRAMS)): $(BIN)%: $(B)/%.o $(OBJECTS) $(B)/flags
	$(call link_program)
$(filter $(BIN)data/%,$(PROGRAMS)): $(BIN)data/%: $(B)/data/datasets/%.o $(OBJECTS) $(B)/flags
	$(call link_program)
$(sort $(ALL_TEST_PROGRAMS) $(B)/tests/test_grid): %: %.o $(B)/tests/only.o $(MORE_OBJECTS) $(B)/flags
	$(call link_program,$(CMOCKA_LIBS))
$(CRASH_SHIM): tests/crash_shim.c tests/crash_shim.h $(B)/flags
	@mkdir -p $(@D); $(call progress,LD $@)
	$(Q)$(CC) -std=c11 -D_GNU_SOURCE -O1 -fPIC -shared $(WARNINGS) -o $@ $< -ldl
$(BENCH_PROGRAMS) $(EXAMPLE_PROGRAMS) $(DRAW) $(FUZZ_LAYOUTS): %: %.o $(MORE_OBJECTS) $(B)/flags
	$(call link_program)
# The objects that each of these needs, by its includes.
NEEDING := $(wildcard tests/test_*.c tests/fuzz_*.c tests/bench_*.c notes/examples/*.c notes/draw.c)
ifneq ($(and $(COMPILES),$(NEEDING)),)
$(foreach rule,$(shell awk -v rules=$(B) -f data/scripts/needs.awk $(NEEDING)),$(eval $(subst |, ,$(rule))))
endif
$(CUDA_EXAMPLES): %: %.cu.o $(OBJECTS) $(B)/flags
	$(call link_program)
# These need mpicc, and nothing that data/scripts/probe.sh finds.
$(filter-out %/8,$(MINI_PROGRAMS)): $(B)/%: %.c | has-mpicc
	@mkdir -p $(@D); $(call progress,MPICC $<)
	$(Q)OMPI_CC='$(CC)' MPICH_CC='$(CC)' $(MPICC) -std=c11 -O1 $(WARNINGS) $(CHECKS) -o $@ $< -lm
$(B)/notes/steps/8: $(B)/notes/mini
	@mkdir -p $(@D); ln -sf ../mini $@
# This one needs nvcc, and neither the library nor a GPU: where none answers, it is compiled for two.
KERNELS_NVCC := $(if $(filter cuda,$(WITHOUT)),,$(strip $(or $(NVCC),$(shell command -v nvcc), \
	$(wildcard $(or $(CUDA_HOME),/usr/local/cuda)/bin/nvcc))))
KERNELS_ARCHS = $(patsubst 90,90a,$(or $(CUDA_ARCH),$(subst .,,$(sort \
	$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9.]*'))),80 90a))
KERNELS_FLAGS = -std=c++17 -O3 -lineinfo \
	$(foreach a,$(KERNELS_ARCHS:%-virtual=%),-gencode=arch=compute_$a,code=sm_$a) \
	$(foreach a,$(filter-out %a,$(KERNELS_ARCHS:%-virtual=%)),-gencode=arch=compute_$a,code=compute_$a) \
	$(if $(WERROR),-Werror all-warnings) $(NVCCFLAGS)
$(KERNELS): notes/examples/kernels.cu $(B)/kernels.flags
	@mkdir -p $(@D); $(call progress,NVCC $<)
	$(Q)$(KERNELS_NVCC) $(KERNELS_FLAGS) -o $@ $<
$(B)/kernels.flags: FORCE | has-nvcc
	+@mkdir -p $(@D); echo '$(KERNELS_FLAGS)' >$@.new; cmp -s $@.new $@ && rm $@.new || mv $@.new $@
has-nvcc:
	@[ -n '$(KERNELS_NVCC)' ] || \
		{ echo "make kernels needs nvcc, of CUDA; NVCC=... or CUDA_HOME=... names its place" >&2; exit 1; }
has-mpicc:
	@command -v $(MPICC) >/dev/null || { echo "make mini needs $(MPICC): make deps installs MPI" >&2; exit 1; }
$(FUZZ_PROGRAMS): %: %.o $(MORE_OBJECTS) $(B)/flags
	$(call link_program,-fsanitize=fuzzer)

$(B)/%.o: %.c $(B)/flags
	@mkdir -p $(@D); $(call progress,CC $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(if $(filter tests/%,$<),$(CMOCKA_CFLAGS)) -MMD -MP -c $< -o $@
# The programs in Python that render chat templates and read files of Parquet, and the page of a server, as texts of C.
text_of_c = sed 's/\\/\\\\/g; s/"/\\"/g; s/.*/"&\\n"/' $< >$@
$(B)/data/tokens/jinja_program.h $(B)/data/datasets/parquet_program.h: $(B)/%_program.h: %.py $(B)/flags
	@mkdir -p $(@D)
	@$(text_of_c)
$(B)/data/serve/page_text.h: data/serve/page.html $(B)/flags
	@mkdir -p $(@D)
	@$(text_of_c)
$(B)/data/serve/serve.o $(B)/pic/data/serve/serve.o: $(B)/data/serve/page_text.h
$(B)/data/tokens/jinja.o $(B)/pic/data/tokens/jinja.o: $(B)/data/tokens/jinja_program.h
$(B)/data/datasets/parquet.o $(B)/pic/data/datasets/parquet.o: $(B)/data/datasets/parquet_program.h
$(B)/%.cu.o: %.cu $(B)/flags
	@mkdir -p $(@D); $(call progress,NVCC $<)
	$(Q)$(NVCC) $(ALL_NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
.SECONDARY:

# ---- The library -----------------------------------------------------------------------------------------------------

# libmegatron holds megatron.c and the companions in data/, compiled again as position-independent code. -march=native
# ties library and programs to CPUs like this one: OPT="-O3 -march=x86-64-v3" builds for others.
VERSION = $(shell sed -n 's/^\#define MT_VERSION *"\(.*\)"/\1/p' megatron.h)
SONAME = libmegatron.so.$(firstword $(subst ., ,$(VERSION)))
LIBRARY_OBJECTS := $(patsubst $(B)/%.o,$(B)/pic/%.o,$(filter-out %.cu.o,$(OBJECTS))) $(filter %.cu.o,$(OBJECTS))
LIBRARIES_BUILT := $(B)/libmegatron.a $(B)/libmegatron.so
HEADERS := megatron.h $(wildcard data/*/*.h)
HEADER_FOLDERS := $(sort $(dir $(filter data/%,$(HEADERS))))

library: $(LIBRARIES_BUILT)
$(B)/libmegatron.a: $(LIBRARY_OBJECTS)
	@$(call progress,AR $@); rm -f $@
	$(Q)ar rcs $@ $^
$(B)/libmegatron.so: $(LIBRARY_OBJECTS)
	@$(call progress,LD $@)
	$(Q)$(CC) -shared -Wl,-soname,$(SONAME) -o $@ $^ $(ALL_LIBS)
$(B)/pic/%.o: %.c $(B)/flags
	@mkdir -p $(@D); $(call progress,CC $< (for the library))
	$(Q)$(CC) $(ALL_CFLAGS) -fPIC -fno-semantic-interposition -MMD -MP -c $< -o $@

PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include/megatron
MANDIR ?= $(PREFIX)/share/man/man1
COMPLETIONDIR ?= $(PREFIX)/share/bash-completion/completions
MACHINEDIR ?= $(PREFIX)/share/megatron/machines

define PC_FILE
prefix=$(PREFIX)
libdir=$(LIBDIR)
includedir=$(INCLUDEDIR)

Name: megatron
Description: trains and runs GPT-family transformers
Version: $(VERSION)
Cflags: -I$${includedir}
Libs: -L$${libdir} -lmegatron -lm
Libs.private: $(strip $(ALL_LIBS))
endef
export PC_FILE

# The programs print their own man page and completion (data/options/option_help.c).
MANUALS := $(addprefix $(B)/megatron-,train.1 infer.1 train.bash infer.bash)
manual: $(MANUALS)
$(B)/megatron-%.1: $(BIN)%
	@$(call progress,MAN $@)
	$(Q)$(if $(BIN),,./)$< --help man-page >$@
$(B)/megatron-%.bash: $(BIN)%
	@$(call progress,BASH $@)
	$(Q)$(if $(BIN),,./)$< --help bash-completion >$@

install: all library manual
	install -d $(addprefix $(DESTDIR),$(BINDIR) $(LIBDIR)/pkgconfig $(MANDIR) $(COMPLETIONDIR) $(MACHINEDIR) \
		$(HEADER_FOLDERS:%=$(INCLUDEDIR)/%))
	install -m 644 data/machines/*.json $(DESTDIR)$(MACHINEDIR)
	install -m 644 $(filter %.1,$(MANUALS)) $(DESTDIR)$(MANDIR)
	$(foreach p,train infer,install -m 644 $(B)/megatron-$p.bash $(DESTDIR)$(COMPLETIONDIR)/megatron-$p &&) :
	$(foreach p,$(PROGRAMS),install $p $(DESTDIR)$(BINDIR)/megatron-$(notdir $p) &&) :
	install -m 644 megatron.h $(DESTDIR)$(INCLUDEDIR)
	$(foreach d,$(HEADER_FOLDERS),install -m 644 $(filter $d%,$(HEADERS)) $(DESTDIR)$(INCLUDEDIR)/$d &&) :
	install -m 644 $(B)/libmegatron.a $(DESTDIR)$(LIBDIR)
	install $(B)/libmegatron.so $(DESTDIR)$(LIBDIR)/libmegatron.so.$(VERSION)
	ln -sf libmegatron.so.$(VERSION) $(DESTDIR)$(LIBDIR)/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libmegatron.so
	echo "$$PC_FILE" >$(DESTDIR)$(LIBDIR)/pkgconfig/megatron.pc
	@[ -n '$(DESTDIR)' ] || { [ "$$(id -u)" = 0 ] && ldconfig 2>/dev/null; \
		ldconfig -p 2>/dev/null | grep -q ' $(LIBDIR)/$(SONAME)$$'; } || \
		echo "programs find $(SONAME) after: sudo ldconfig $(LIBDIR)   or with LD_LIBRARY_PATH=$(LIBDIR)"

uninstall:
	rm -f $(foreach p,$(PROGRAM_NAMES),$(DESTDIR)$(BINDIR)/megatron-$(notdir $p))
	rm -f $(foreach p,train infer,$(DESTDIR)$(MANDIR)/megatron-$p.1 $(DESTDIR)$(COMPLETIONDIR)/megatron-$p)
	rm -f $(DESTDIR)$(LIBDIR)/libmegatron.* $(DESTDIR)$(LIBDIR)/pkgconfig/megatron.pc
	rm -rf $(DESTDIR)$(MACHINEDIR)
	rmdir $(DESTDIR)$(dir $(MACHINEDIR)) 2>/dev/null || :
	rm -rf $(DESTDIR)$(INCLUDEDIR)
	@[ -n '$(DESTDIR)' ] || [ "$$(id -u)" != 0 ] || ldconfig 2>/dev/null || :
-include $(wildcard $(B)/*.d $(B)/*/*.d $(B)/*/*/*.d $(B)/*/*/*/*.d)

# ---- Tests, benchmarks, demo -----------------------------------------------------------------------------------------

# tests/lsan.supp suppresses leaks inside MPI and OpenMP. To recognise them, stacks must be complete.
SANITIZER_SETTINGS := ASAN_OPTIONS=$(if $(SANITIZE),fast_unwind_on_malloc=0) UBSAN_OPTIONS=print_stacktrace=1 \
	LSAN_OPTIONS="suppressions='$(CURDIR)/tests/lsan.supp':print_suppressions=0"

# Suites that run at a time; on a GPU one, which may need all of its memory.
TEST_JOBS ?= $(if $(GPU_ARCH),1,2)
# Further programs that a suite runs.
NEEDED_BY_crash = $(CRASH_SHIM)
NEEDED_BY_workshop = $(if $(HAVE_CMOCKA),$(B)/tests/test_grid)
NEEDED_BY_examples = $(EXAMPLE_PROGRAMS) $(CUDA_EXAMPLES)
NEEDED_BY_notes = $(EXAMPLE_PROGRAMS) $(CUDA_EXAMPLES) $(if $(MINI),$(MINI_PROGRAMS))
NEEDED_BY_gpus = $(if $(KERNELS_NVCC),$(KERNELS))
NEEDED_BY_mini = $(MINI)
NEEDED_BY_puzzles = $(MINI)
NEEDED_BY_bench_gpu = $(B)/tests/bench_cuda_attention
NEEDED_BY_planner = $(B)/tests/bench_calibrate
NEEDED_BY_fuzz_layouts = $(FUZZ_LAYOUTS)
NEEDED_BY_pictures = $(DRAW)
NEEDED_BY_book = $(DRAW)
# Suites in C need their program alone; of the others, those whose text names train, infer, preprocess or make need all.
SHELL_SUITES = $(wildcard $(SUITES:%=tests/test_%.sh))
RUN_PROGRAMS = $(shell grep -lE '^[^\#]*([$$](train|infer)|MT_BIN|MT_TESTS|preprocess|make )' $(SHELL_SUITES) /dev/null)
test: $(if $(RUN_PROGRAMS),all) $(TEST_PROGRAMS) $(sort $(foreach s,$(SUITES),$(NEEDED_BY_$s)))
	@$(if $(HAVE_CMOCKA),:,echo "make test needs cmocka: make deps installs it" >&2; exit 1)
	@$(SANITIZER_SETTINGS) MT_BIN='$(or $(BIN:%/=%),.)' MT_DRAW='$(DRAW)' MT_TESTS='$(CURDIR)/$(B)/tests' \
		MT_EXAMPLES='$(B)/notes/examples' MT_MINI='$(MINI)' HAVE_MPI='$(HAVE_MPI)' TEST_JOBS='$(TEST_JOBS)' \
		MT_ONLY='$(ONLY)' MT_BRIEF='$(SECTIONS)' tests/run_tests.sh $(B)/tests $(SUITES)

test-all:
	+@$(MAKE) --no-print-directory test SUITES='$(ALL_SUITES)'
test-slow:
	+@$(MAKE) --no-print-directory test SUITES='$(SLOW_SUITES)'

# Suite, seconds and processor seconds, as rows of the table of CONTRIBUTING.md.
times:
	@cat $(B)/tests/*.seconds 2>/dev/null | sort -k3,3nr -k1,1 | awk '{ sum += $$2; processor += $$3 } \
		{ print "| `" $$1 "` | " $$2 " | " $$3 " |" } \
		END { if (NR) print "| together | " sum " | " processor " |"; else exit 1 }' || \
		{ echo "no suite ran in $(B)/tests" >&2; exit 1; }

# The files that an example needs, as one line.
needs:
	@[ -f 'notes/examples/$(EXAMPLE).c' ] || { echo "make needs EXAMPLE=name: of" \
		$(sort $(basename $(notdir $(wildcard notes/examples/*.c)))) >&2; exit 1; }
	@echo $$(awk -f data/scripts/needs.awk notes/examples/$(EXAMPLE).c)

mini: $(MINI_PROGRAMS)
kernels: $(KERNELS)
examples: all $(EXAMPLE_PROGRAMS) $(CUDA_EXAMPLES) $(if $(ARCHS),$(KERNELS)) $(if $(MINI),$(MINI_PROGRAMS))

bench: all $(BENCH_PROGRAMS)
	@for program in $(filter-out %/bench_checkpoint %/bench_calibrate,$(BENCH_PROGRAMS)); do $$program || exit 1; done

bench-gpu: all $(filter %/bench_cuda %/bench_cuda_attention %/bench_decode,$(BENCH_PROGRAMS))
	@MT_BIN='$(or $(BIN:%/=%),.)' tests/bench_gpu.sh $(B)/tests

# With several GPUs and mpirun, also their links.
calibrate: $(B)/tests/bench_calibrate
	@gpus=$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); launch=''; \
		if [ "$$gpus" -gt 1 ] && [ -n '$(HAVE_MPI)' ]; then launch="mpirun -np $$gpus"; fi; \
		OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 $$launch $< \
		$(or $(BASE),data/machines/h200.json) $(or $(OUT),machine.json)

bench-bitwise: all
	@MT_BIN='$(or $(BIN:%/=%),.)' tests/bench_bitwise.sh $(ARGS)

bench-experts: all
	@mkdir -p $(B)/tests
	@MT_BIN='$(or $(BIN:%/=%),.)' tests/bench_experts.sh $(B)/tests

bench-fp8: all
	@MT_BIN='$(or $(BIN:%/=%),.)' DEVICE='$(DEVICE)' STEPS='$(STEPS)' tests/bench_fp8.sh $(B)/bench-fp8 $(TEXT)

FOLDER ?= $(B)/checkpoint
LAYERS ?= 12
ROUNDS ?= 5
bench-checkpoint: $(B)/tests/bench_checkpoint
	@$< $(FOLDER) $(LAYERS) $(ROUNDS)
	@$(if $(HAVE_MPI),OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 \
		mpirun --oversubscribe -np 4 $< $(FOLDER) $(LAYERS) $(ROUNDS))
	@$(if $(GPU_ARCH),$< $(FOLDER) $(LAYERS) $(ROUNDS) --device cuda)
	@$(if $(GPU_ARCH),$< $(FOLDER) $(LAYERS) $(ROUNDS) --device cuda --bf16)

pictures: $(DRAW)
	$(if $^,$^ notes)
	$(if $^,@$^ --steps >build/steps && awk -f notes/planner_rows.awk build/steps notes/lab.md >build/lab.md && \
		cat build/lab.md >notes/lab.md && rm build/lab.md build/steps)

# The pages are made by pandoc; without it nothing is compiled for them.
book: $(if $(shell command -v pandoc),all $(DRAW)) | has-pandoc
	@MT_BIN='$(or $(BIN:%/=%),.)' MT_DRAW='$(DRAW)' HAVE_MPI='$(HAVE_MPI)' notes/book/book.sh '$(or $(OUT),build/book)'
has-pandoc:
	@command -v pandoc >/dev/null || { echo "make book needs pandoc: make deps-dev installs it" >&2; exit 1; }

PUZZLE ?= build/puzzle-$(N)
puzzle:
	@[ -f 'notes/puzzles/$(N).patch' ] || { echo "make puzzle N=1: N is 1 to 10" >&2; exit 1; }
	@mkdir -p build
	@patch -s -F0 -o '$(PUZZLE).c' notes/mini.c 'notes/puzzles/$(N).patch'
	@mpicc -std=c11 -O1 -o '$(PUZZLE)' '$(PUZZLE).c' -lm; status=$$?; rm -f '$(PUZZLE).c'; exit $$status
	@echo "built $(PUZZLE): where does it differ from notes/mini.c?"

notes:
	@for page in notes/*.md notes/steps/*.md README.md; do \
		awk -f notes/weave.awk $$page >$$page.new && mv $$page.new $$page || { rm -f $$page.new; exit 1; }; done
	@tests/sections --weave >CONTRIBUTING.md.new && mv CONTRIBUTING.md.new CONTRIBUTING.md || \
		{ rm -f CONTRIBUTING.md.new; exit 1; }

# Ranks of the demos: a layout of four, two or one, as many as there are cores.
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null)
DEMO_RANKS = $(or $(RANKS),$(if $(HAVE_MPI),$(if $(filter-out 1 2 3,$(CORES)),4,$(if $(filter 1,$(CORES)),1,2)),1))
demo: all
	@MT_BIN='$(or $(BIN:%/=%),.)' DEMO_RANKS='$(DEMO_RANKS)' data/scripts/demo.sh

demo-rl: all
	@MT_BIN='$(or $(BIN:%/=%),.)' DEMO_RANKS='$(or $(RANKS),$(if $(filter cuda,$(DEVICE)),1,$(DEMO_RANKS)))' \
		DEMO_MODEL='$(MODEL)' DEMO_DEVICE='$(or $(DEVICE),cpu)' data/scripts/demo-rl.sh

demo-agent: all
	@MT_BIN='$(or $(BIN:%/=%),.)' data/scripts/demo-agent.sh
demo-vision: all
	@MT_BIN='$(or $(BIN:%/=%),.)' data/scripts/demo-vision.sh

plot:
	@data/scripts/plot.sh "$$RUN" $${OUT:+"$$OUT"}

trace: all
	@MT_BIN='$(or $(BIN:%/=%),.)' RANKS='$(if $(HAVE_MPI),$(or $(RANKS),4),1)' OPTIONS='$(OPTIONS)' \
		data/scripts/trace.sh '$(or $(OUT),build/trace.html)' $(TRACE)

FUZZ_SECONDS ?= 600
fuzz:
	+@$(MAKE) --no-print-directory CC=$(or $(FUZZ_CC),clang) FUZZER=1 fuzz-programs
fuzz-programs: $(FUZZ_PROGRAMS)
	@$(SANITIZER_SETTINGS) tests/run_fuzz.sh $(FUZZ_SECONDS) $^

# REQUESTS to a server by CLIENTS at once, on this machine; SANITIZE=1 checks memory.
REQUESTS ?= 20000
CLIENTS ?= 200
fire:
	+@MT_FIRE_REQUESTS=$(REQUESTS) MT_FIRE_CLIENTS=$(CLIENTS) MT_FIRE_SECONDS=3600 \
		$(MAKE) --no-print-directory test SUITES=serve ONLY=holds_under_fire

# Configuration NUMBER of SEED alone, or as many as SECONDS allow.
SECONDS ?= 600
SEED ?= 1
fuzz-layouts: all $(FUZZ_LAYOUTS)
	@$(if $(HAVE_MPI),$(SANITIZER_SETTINGS) MT_BIN='$(or $(BIN:%/=%),.)' \
		$(DEVICE:%=FUZZ_DEVICE=%) $(RANKS:%=FUZZ_RANKS=%) $(STAGE:%=FUZZ_STAGE=%) \
		$(FUZZ_LAYOUTS) $(SECONDS) $(SEED) $(NUMBER),\
		echo "skipped: MPI is absent")

# ---- Lint, format, help ----------------------------------------------------------------------------------------------

FORMATTED = $(wildcard *.c *.h data/*/*.c data/*/*.h tests/*.c tests/*.h notes/*.c notes/steps/[1-7].c \
	notes/examples/*.c* cuda/*.cu cuda/*.cuh cuda/*.h)
CLANG_FORMAT ?= clang-format

lint:
	@tests/lint
sizes:
	@tests/lint --sizes
format:
	$(CLANG_FORMAT) -i $(FORMATTED)
format-check:
	$(CLANG_FORMAT) --dry-run --Werror $(FORMATTED)

probe:
	@rm -f $(B)/config.mk
	+@$(MAKE) -s $(B)/config.mk

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

clean:
	rm -rf build train infer data/preprocess

# ---- Packages --------------------------------------------------------------------------------------------------------

APT := build-essential pkg-config libopenmpi-dev openmpi-bin libopenblas-openmp-dev libdnnl-dev libjansson-dev \
	libyaml-dev libpcre2-dev libutf8proc-dev libmicrohttpd-dev libpng-dev libjpeg-dev libcmocka-dev gnuplot-nox \
	patch python3-jinja2
DNF := gcc make pkgconf-pkg-config openmpi-devel openblas-devel onednn-devel jansson-devel libyaml-devel \
	pcre2-devel utf8proc-devel libmicrohttpd-devel libpng-devel libjpeg-turbo-devel libcmocka-devel gnuplot patch \
	python3-jinja2
BREW := gcc make pkg-config open-mpi openblas libomp onednn jansson libyaml pcre2 utf8proc libmicrohttpd libpng \
	jpeg-turbo cmocka gnuplot

# Installs the packages $1 that are missing, without asking. $2 and $3: their names for dnf and brew.
define install_packages
@if ! command -v apt-get >/dev/null; then \
	echo "no apt-get here; elsewhere the packages are:"; echo "  dnf install $2"; echo "  brew install $3"; exit; \
fi; \
for package in $1; do \
	dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; \
done; \
if [ -z "$$missing" ]; then echo "all packages are installed"; exit; fi; \
root=; [ "$$(id -u)" = 0 ] || root=sudo; \
apt="$$root env DEBIAN_FRONTEND=noninteractive apt-get -q"; \
echo "installing:$$missing"; \
mkdir -p build; \
{ $$apt update && $$apt install -y --no-install-recommends $$missing; } >build/apt.log 2>&1 </dev/null || \
	{ tail -n 20 build/apt.log >&2; exit 1; }; \
rm -f build/*/config.mk
endef

deps:
	$(call install_packages,$(APT),$(DNF),$(BREW))
# The pages of `make book` are made by pandoc; they and that of `make trace` are tested in chromium, where the
# distribution has it as a package of its own.
# The tests of data/recipes use shellcheck, a parser for YAML, and hadolint, which no distribution packages.
# No distribution has pyarrow and duckdb for the suite parquet: pip installs them in a folder of build/, with nbconvert
# and ipykernel, which run notes/first-hour.ipynb.
# .ci/run also needs clang with its sanitizers, libFuzzer and OpenMP. Debian and Ubuntu split these differently into
# packages, which are named after clang's version NN.
CLANG = $(shell apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9][0-9]*\)$$/\1/p')
deps-dev: deps
	$(call install_packages,clang clang-format shellcheck python3-yaml python3-venv iproute2 pandoc \
		$(CLANG:%=libomp-%-dev) $(if $(shell apt-cache show chromium 2>/dev/null),chromium) \
		$(if $(shell apt-cache show libclang-rt-$(CLANG)-dev 2>/dev/null),libclang-rt-$(CLANG)-dev),\
		clang clang-tools-extra compiler-rt libomp-devel ShellCheck python3-pyyaml iproute pandoc chromium,\
		llvm shellcheck pandoc)
	@mkdir -p build; build/python/bin/python -c 'import pyarrow, duckdb, nbconvert, ipykernel' 2>/dev/null || \
		{ python3 -m venv build/python && \
		build/python/bin/pip -q install pyarrow duckdb nbconvert ipykernel; } >build/pip.log 2>&1 || \
		echo "pip installs no pyarrow (build/pip.log): the suites parquet and notebook are skipped in part"

endif
