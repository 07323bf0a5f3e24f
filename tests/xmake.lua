-- Tests: few binaries, because every one links Boost.Test anew. `./x test` runs them.
set_group("tests")

-- Programs of test cases are compiled by clang, where it is: without optimisation, g++ takes up to twice the time, four
-- fifths of it for making code. g++ compiles the library, the examples and the small programs, and with
-- `./x test --long` all.
local clang = get_config("clang") or ""
local has_clang = clang ~= ""
local clang_flags = {"-Wno-unknown-pragmas", "-Wno-unused-lambda-capture", "-Wno-deprecated-declarations"}
if is_arch("arm64") then  -- as on others: the older way to choose instructions is the faster one
    table.insert(clang_flags, "-mllvm=-aarch64-enable-global-isel-at-O=-1")
end

-- A sanitizer: what it checks, parameters of the compiler for it, and the library that is compiled so.
local function sanitizer(library, by_clang, checks, parameters)
    local flags = table.copy(checks)
    for _, parameter in ipairs(parameters) do
        table.insert(flags, (by_clang and "-mllvm=-" or "--param=") .. parameter)
    end
    if by_clang then table.join2(flags, clang_flags) end
    return {library = library, by_clang = by_clang, flags = flags, links = checks[1]}
end

-- The address and undefined-behaviour sanitizers, without those checks of the latter that find little beside the
-- former and take a quarter of the time that compiling takes. Accesses are checked by calls, not in line, and reports
-- have the names of functions without lines: together a sixth of the time.
local calls = "asan-instrumentation-with-call-threshold=0"
local all = {"-fsanitize=address,undefined", "-fno-sanitize=null,object-size,vptr,alignment", "-fno-sanitize-recover=all"}
local address = sanitizer("lockstep_address", has_clang, all, {calls})
local thread = sanitizer("lockstep_thread", has_clang, {"-fsanitize=thread", "-g1"}, {})
local none = {library = "lockstep_compiled", by_clang = has_clang, flags = has_clang and clang_flags or {}, links = {}}
-- For the largest programs the address sanitizer alone, which watches the heap and neither stack nor globals: another third. The
-- code that they share with the others, which is most of it, is compiled with all checks there.
local function lean(like)
    local only_address = sanitizer(like.library, like.by_clang, {"-fsanitize=address"}, {calls, "asan-stack=0", "asan-globals=0"})
    only_address.links = like.links  -- the library's, too
    return only_address
end

for _, each in ipairs({address, thread}) do
    compiled_library(each.library, each.flags)
        set_group("tests")
        if each.by_clang then set_toolset("cxx", clang) end
    target_end()
end

-- Boost.Test itself, compiled once. It needs no sanitizer.
target("test_main")
    set_kind("static")
    add_files("main.cpp")
    set_optimize("none")
target_end()

-- A binary of Boost.Test cases. Most of the time that tests take to compile goes into functions of headers that every
-- file needs again, so files are compiled together, in as many batches as are named: { batch = patterns }. A test's
-- helpers are in its suite's namespace, where others do not see them.
-- What most of them include is compiled once for a program of several batches.
local function test_program(name, batches, sanitizer, precompiled)
    target(name)
        set_kind("binary")
        set_targetdir("$(projectdir)/build/tests")
        add_deps(sanitizer and sanitizer.library or "lockstep_compiled", "test_main")
        add_rules("c++.unity_build", {batchsize = 0})
        for batch, files in pairs(batches) do
            add_files(files, {unity_group = batch})
        end
        add_includedirs(".", "../examples")
        add_sysincludedirs("$(eigen)")
        add_syslinks("pthread", "z")
        if has_config("lmdb") then add_syslinks("lmdb") end
        add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"")
        set_optimize("none")
        add_cxflags("-Wno-psabi", {force = true})  -- which tells of an old ABI
        if precompiled then set_pcxxheader(precompiled) end
        if sanitizer and has_clang then set_toolset("ld", clang) end
        if sanitizer and sanitizer.by_clang then
            set_toolset("cxx", "clang@" .. clang)  -- by its own name xmake gives it g++'s flags for precompiled headers
        else
            add_cxflags("-Wno-subobject-linkage", {force = true})  -- which takes a test among others for a header
            collect_late()
        end
        if sanitizer then
            add_cxflags(sanitizer.flags, {force = true})
            add_ldflags(sanitizer.links, {force = true})
        end
end

-- Unit tests and instantiation tests.
test_program("unit", {
    small = {"checkpoint/*_test.cpp", "core/*_test.cpp", "device/*_test.cpp", "model/*_test.cpp",
             "norm/batch_norm_test.cpp", "norm/dropout_test.cpp", "observe/*_test.cpp", "optim/*_test.cpp", "policy/*_test.cpp", "topology/*_test.cpp"},
    data = {"bucket/*_test.cpp", "data/*_test.cpp", "launch/*_test.cpp", "store/*_test.cpp"},
    jobs = {"examples/*_test.cpp", "instantiate/*_test.cpp", "trainer/*_test.cpp"},
}, address, "precompiled.hpp")
target_end()

-- Ranks that communicate: every element type and operation plainly, everything else under the address and the
-- thread sanitizer, the latter with the loader's threads and ranks that train as threads.
local communicating = {"comm/call_log_test.cpp", "comm/collectives_test.cpp", "comm/deaths_test.cpp",
                       "comm/faults_test.cpp", "comm/flight_recorder_test.cpp", "comm/rendezvous_test.cpp", "comm/process_group_test.cpp",
                       "comm/sequences_test.cpp", "comm/tally_test.cpp", "comm/thread_collectives_test.cpp", "comm/thread_launch_test.cpp",
                       "comm/toy_test.cpp"}
test_program("comm", {types = {"comm/protocol_test.cpp", "comm/thrust_test.cpp", "comm/types_test.cpp"}}, none)
target_end()
test_program("comm_address", {comm = communicating}, address)
target_end()
test_program("comm_thread", {
    comm = table.join(communicating, "store/store_test.cpp"),
    train = {"data/loader_test.cpp", "strategy/dp_test.cpp", "strategy/replica_workers_test.cpp", "train/threads_test.cpp"},
}, thread, "precompiled.hpp")
target_end()

-- Strategies, and ranks that train: real processes, against PyTorch's figures and against one process.
test_program("train", {
    figures = {"train/parity_test.cpp", "train/accumulation_test.cpp", "train/property_*test.cpp", "train/alone_test.cpp",
               "train/convnet_test.cpp", "train/parameter_groups_test.cpp", "norm/synced_test.cpp", "train/hooks_test.cpp",
               "train/join_test.cpp", "train/norm_test.cpp", "train/zero_test.cpp"},
    jobs = {"train/checkpoint_*test.cpp", "train/faults_test.cpp", "train/outputs_test.cpp", "train/resume_test.cpp",
            "train/threads_test.cpp", "train/trainer_test.cpp"},
    replicas = {"train/dp_*_test.cpp", "train/listed_test.cpp", "strategy/*_test.cpp"},
}, lean(address), "precompiled.hpp")
target_end()

-- The checked mode, in which all files of a program are compiled or none.
test_program("checked", {checked = "train/checked_test.cpp"}, address)
    add_defines("LOCKSTEP_CHECKED")
target_end()

-- For programs whose GPUs the host plays.
local function play_gpus()
    add_includedirs(".", "gpu/emulated/include")
    add_cxflags("-Wno-unknown-pragmas", {force = true})  -- those of nvcc
    add_sysincludedirs("$(cccl)/..")
end

-- Programs of ranks, which say what they communicate through.
local function rank_program(name, file)
    target(name)
        set_kind("binary")
        set_targetdir("$(projectdir)/build/tests")
        add_deps("lockstep_compiled")
        if has_clang then
            set_toolset("cxx", clang)
            add_cxflags(clang_flags, {force = true})
        else
            collect_late()
        end
        add_files(file)
        add_syslinks("pthread", "z")
        set_optimize("none")
end

-- Ranks that communicate and train through Gloo, and a job for several hosts (tests/network/run).
if has_config("gloo") then
    test_program("gloo", {gloo = {"comm/gloo_leaving_test.cpp", "comm/gloo_sequences_test.cpp", "comm/gloo_test.cpp", "comm/hierarchical_test.cpp"},
                          train = {"train/*gloo*_test.cpp", "norm/synced_gloo_test.cpp"}}, lean(address), "precompiled.hpp")
        add_links("gloo")
    target_end()

    rank_program("network_job", "network/job.cpp")
        add_links("gloo")
        add_includedirs("../examples")
        add_sysincludedirs("$(eigen)")
        set_optimize("fast")  -- it trains in a dozen of jobs, whose ranks share the machine
    target_end()

    -- A training to which something happens (tests/faults/run).
    rank_program("faults_job", "faults/job.cpp")
        add_links("gloo")
    target_end()

    -- The same over NCCL, which the host plays with the GPUs.
    if has_config("nccl") then
        rank_program("faults_job_nccl", "faults/job.cpp")
            set_group("soak")
            add_defines("LOCKSTEP_EMULATED_NCCL=1")
            play_gpus()
        target_end()
    end

    -- Jobs that are slow for a known reason, whose traces tests/trace/run looks at.
    rank_program("slow", "trace/slow.cpp")
        add_links("gloo")
    target_end()
end

-- Ranks that mpirun starts (tests/mpi/run).
if has_mpi() then
    test_program("mpi_tests", {mpi = {"comm/mpi_*test.cpp", "train/mpi_parity_test.cpp"}}, lean(address))
        if has_config("gpu") then  -- device memory, of GPUs that the host plays
            add_files("gpu/emulated/*_mpi_test.cpp")
            add_defines("LOCKSTEP_RUNS_ON_GPU=0")
            add_includedirs("comm")
            play_gpus()
        end
        link_mpi()
    target_end()

    -- The thread that advances MPI's calls, under the thread sanitizer.
    test_program("mpi_thread", {mpi = "comm/mpi_thread_test.cpp"}, thread)
        link_mpi()
    target_end()

    rank_program("mpi_job", "faults/job.cpp")
        add_defines("LOCKSTEP_MPI=1")
        link_mpi()
    target_end()

    -- The same with NCCL inside hosts.
    if has_config("gpu") and has_config("nccl") then
        rank_program("mpi_job_nccl", "faults/job.cpp")
            add_defines("LOCKSTEP_MPI=1", "LOCKSTEP_EMULATED_NCCL=1")
            play_gpus()
            link_mpi()
        target_end()
    end
end

-- Trainings of many kinds, which tests/soak/run disturbs. They take minutes to compile, so that no test does: `./x soak`.
local function soak_program(name, files)
    target(name)
        set_group("soak")
        set_kind("binary")
        set_targetdir("$(projectdir)/build/tests")
        add_deps("lockstep_compiled")
        add_files(files)
        add_includedirs(".")
        add_links("gloo")
        add_syslinks("pthread")
        set_optimize("fast")
        if has_clang then
            set_toolset("cxx", clang)
            add_cxflags(clang_flags, {force = true})
        end
end
if has_config("gloo") then
    soak_program("soak_job", {"soak/job.cpp", "soak/networks.cpp", "soak/replicated.cpp", "soak/shared_memory.cpp"})
    target_end()
    if has_config("gpu") then
        soak_program("soak_emulated", "soak/emulated.cpp")
            play_gpus()
        target_end()
    end
end

-- LibTorch's modules. Its headers are read once, by a precompiled header. With it, each file would still take seconds, for
-- templates that all of them use, so they are compiled in three batches here as well.
if has_torch() then
    local batches = {}
    for i, file in ipairs(os.files(path.join(os.scriptdir(), "torch/*_test.cpp"))) do
        batches["torch" .. i % 3] = table.join(batches["torch" .. i % 3] or {}, file)
    end
    test_program("torch_tests", batches, none)
        set_filename("torch")
        set_pcxxheader("torch/precompiled.hpp")
        if has_clang then
            set_toolset("cxx", "clang@" .. clang)
            add_cxxflags("-fpch-instantiate-templates", {force = true})  -- once, for all batches
            add_cxxflags("-fclang-abi-compat=17", {force = true})        -- names of templates as in g++'s LibTorch
        end
        link_torch()
    target_end()
end

-- A program that launches itself and behaves as it is told: what tests/launch/run supervises.
target("trainer")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("lockstep_compiled")
    collect_late()
    add_files("launch/trainer.cpp")
    add_syslinks("pthread")
    set_optimize("none")
target_end()

-- A program that writes and reads files, beside Python (tests/checkpoint/python).
target("exchange")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("lockstep_compiled")
    collect_late()
    add_files("checkpoint/exchange.cpp")
    add_syslinks("pthread")
    set_optimize("none")
target_end()

-- A job that saves and resumes: what tests/checkpoint/kill kills.
target("trained")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("lockstep_compiled")
    collect_late()
    add_files("checkpoint/trained.cpp")
    add_syslinks("pthread")
    set_optimize("none")
target_end()

-- Cases of which one asserts nothing (tests/suites/run).
target("cases")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("test_main")
    add_files("suites/cases.cpp")
    set_optimize("none")
target_end()

-- Translation units with everything in them, one program: two use the library, one is header-only.
target("link")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("lockstep_compiled")
    collect_late()
    add_files("link/*.cpp|header_only.cpp")
    add_files("link/header_only.cpp", {undefines = "LOCKSTEP_COMPILED"})
    set_optimize("none")
target_end()

-- Programs on GPUs: compiled and linked wherever nvcc is, run where a GPU is (tests/gpu/run).
if has_config("gpu") then
    -- Where nothing can be run, checks that would instantiate the same code once more are left out. They are compiled
    -- where a GPU is, or where LOCKSTEP_GPU_HOST=1 says that what is built here will run on a host that has one.
    local runs = #os.files("/dev/nvidia[0-9]*") > 0 or os.getenv("LOCKSTEP_GPU_HOST") == "1"

    local function gpu_program(name, files, group)
        target(name)
            set_group(group or "gpu")
            set_kind("binary")
            set_targetdir("$(projectdir)/build/tests")
            add_deps("lockstep_compiled")
            add_files(files)
            add_includedirs(".", "../examples")
            add_syslinks("pthread")
            compile_for_gpus()
            set_optimize("none")  -- of host code; kernels are optimised all the same
            set_warnings("none")
            add_cuflags("-Xcompiler=-Wall,-Wextra", "-Werror=all-warnings", {force = true})
            add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"",
                        "LOCKSTEP_RUNS_ON_GPU=" .. (runs and 1 or 0))
    end

    -- For the programs that have a part for a backend where it is.
    local function link_nccl()
        add_defines("LOCKSTEP_HAS_NCCL=" .. (has_config("nccl") and 1 or 0))
        if has_config("nccl") then add_links("nccl") end
    end
    local function link_gloo()
        add_defines("LOCKSTEP_HAS_GLOO=" .. (has_config("gloo") and 1 or 0))
        if has_config("gloo") then add_links("gloo") end
    end

    -- The library's vocabulary in device code, for the oldest and a newer architecture.
    gpu_program("cuda", "cuda/*.cu")
        add_cugencodes("sm_80")
    target_end()

    -- Kernels, the example's model, and ranks that are threads.
    gpu_program("gpu", "gpu/*_test.cu", "gpu_all")
        if not runs then
            remove_files("gpu/mlp_test.cu", "gpu/thread_types_test.cu")  -- the example and threads_test have the same code
        end
        add_deps("test_main")
        add_links("cublasLt")
    target_end()

    -- DDP, through each backend. (Example 04 has much of it, and is compiled everywhere.)
    gpu_program("ddp_threads", "gpu/ddp_threads.cu", "gpu_all")
    target_end()
    -- Sharded states, and trainers, through all backends that there are.
    gpu_program("ddp_zero", "gpu/ddp_zero.cu", "gpu_all")
        link_nccl()
        link_gloo()
    target_end()
    gpu_program("memory_limit", "gpu/memory_limit.cu", "gpu_all")
    target_end()
    gpu_program("trainers", "gpu/trainers.cu", "gpu_all")
        link_nccl()
        link_gloo()
    target_end()
    -- Modules of LibTorch. Its headers are read by nvcc three times, which takes minutes.
    if has_torch_for_gpus() then
        gpu_program("torch_gpu", "gpu/torch.cu", "gpu_all")
            link_nccl()
            link_torch()
        target_end()
    end
    -- Example gpt2 beside PyTorch's GPT-2, and the ways to train it beside each other.
    if has_cudnn_frontend() then
        gpu_program("gpt2_gpu", "gpu/gpt2.cu", "gpu_all")
            add_deps("cudnn_attention")
            add_links("cublasLt")
            link_cudnn()
        target_end()
    end
    -- Batch norms, alone and in networks, through all backends that there are.
    gpu_program("norms_gpu", {"gpu/norms.cu", "gpu/norms_threads.cu"}, "gpu_all")
        link_nccl()
        link_gloo()
        add_defines("LOCKSTEP_HAS_CUDNN=" .. (has_cudnn() and 1 or 0))
        if has_config("nccl") then add_files("gpu/norms_nccl.cu") end
        if has_config("gloo") then add_files("gpu/norms_gloo.cu") end
        if has_cudnn() then link_cudnn() end
    target_end()
    -- Hooks, and updates that leave parameters out.
    gpu_program("hooks_gpu", "gpu/hooks.cu", "gpu_all")
        link_nccl()
    target_end()
    -- DP, whose replicas are threads as well.
    gpu_program("dp", "gpu/dp.cu", "gpu_all")
    target_end()
    gpu_program("checked_gpu", "gpu/checked.cu", "gpu_all")
        add_defines("LOCKSTEP_CHECKED")
    target_end()
    if has_config("gloo") then
        gpu_program("ddp_gloo", "gpu/ddp_gloo.cu", "gpu_all")
            add_links("gloo")
        target_end()
        gpu_program("gloo_ranks", "gpu/gloo_ranks.cu", "gpu_all")
            add_links("gloo")
        target_end()

        -- Gloo for GPUs, hierarchies on a stream of their own, and ranks and replicas on several GPUs, with CUDA and
        -- its kernels emulated by the host: they run everywhere.
        test_program("emulated", {
            processes = {"gpu/emulated/staged_test.cpp", "gpu/emulated/streamed_test.cpp"},
            many = "gpu/emulated/*_test.cpp|counted_test.cpp|hooks_test.cpp|join_test.cpp|zero_test.cpp|*_mpi_test.cpp|staged_test.cpp|streamed_test.cpp",
            policies = {"gpu/emulated/counted_test.cpp", "gpu/emulated/hooks_test.cpp", "gpu/emulated/join_test.cpp", "gpu/emulated/zero_test.cpp"},
        }, lean(address), "gpu/emulated/precompiled.hpp")
            set_group("gpu")
            add_includedirs("comm")
            play_gpus()
            add_links("gloo")
        target_end()
    end
    if has_config("nccl") then
        gpu_program("ddp_nccl", "gpu/ddp_nccl.cu", "gpu_all")
            add_links("nccl")
        target_end()
        gpu_program("nccl_ranks", "gpu/nccl_ranks.cu", "gpu_all")
            add_links("nccl")
        target_end()
        gpu_program("ddp_hierarchy", "gpu/ddp_hierarchy.cu", "gpu_all")
            add_links("nccl")
        target_end()
        if has_mpi() then
            gpu_program("mpi_nccl", "gpu/mpi_nccl.cu", "gpu_all")
                add_links("nccl")
                link_mpi()
            target_end()
        end

        -- The watch over NCCL, with CUDA and NCCL emulated by the test: it runs everywhere.
        target("nccl_watch")
            set_group("gpu")
            set_kind("binary")
            set_targetdir("$(projectdir)/build/tests")
            add_deps("lockstep_compiled")
            collect_late()
            add_files("gpu/nccl_watch.cpp")
            add_includedirs(".")
            add_sysincludedirs("$(cccl)/..")
            add_syslinks("pthread")
            set_optimize("none")
        target_end()
    end
end
