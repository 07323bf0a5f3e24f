-- Tests: few binaries, because every one links Boost.Test anew. `./x test` runs them.
set_group("tests")

-- The address and undefined-behaviour sanitizers, without those checks of the latter that find little beside the
-- former and take a quarter of the time that compiling takes. comm_address has them all.
local sanitizers = {"-fsanitize=address,undefined", "-fno-sanitize=null,object-size,vptr,alignment",
                    "-fno-sanitize-recover=all", "-g1"}

-- What needs Gloo, and has a binary of its own.
local gloo_tests = {"comm/gloo_test.cpp", "comm/hierarchical_test.cpp", "train/gloo_parity_test.cpp"}

-- Boost.Test itself, compiled once. It needs no sanitizer.
target("test_main")
    set_kind("static")
    add_files("main.cpp")
    set_optimize("none")
target_end()

-- Unit tests, instantiation tests and the layer check, under the address and undefined-behaviour
-- sanitizers.
target("unit")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("lockstep")
    add_deps("test_main")
    add_files("*/*_test.cpp")
    set_pcxxheader("pch.hpp")
    remove_files("comm/*_test.cpp", "train/*_test.cpp")
    add_syslinks("pthread", "z")
    add_includedirs(".", "../examples")
    add_sysincludedirs("$(eigen)")
    set_optimize("none")
    add_cxflags(sanitizers, {force = true})
    add_ldflags("-fsanitize=address,undefined", {force = true})
    add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"")
target_end()

-- Ranks that communicate: every element type and operation plainly, everything else under the address and the
-- thread sanitizer, the latter with the loader's threads and ranks that train as threads.
for name, sanitizer in pairs({comm = "", comm_address = "address,undefined", comm_thread = "thread"}) do
    target(name)
        set_kind("binary")
        set_targetdir("$(projectdir)/build/tests")
        add_deps("lockstep", "test_main")
        add_includedirs(".")
        add_syslinks("pthread")
        add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"")
        set_optimize("none")
        if sanitizer == "" then
            add_files("comm/types_test.cpp")
        else
            add_files("comm/*_test.cpp")
            remove_files("comm/types_test.cpp", table.unpack(gloo_tests))
            set_pcxxheader("pch_all.hpp")
            add_cxflags("-fsanitize=" .. sanitizer, "-g1", {force = true})
            add_ldflags("-fsanitize=" .. sanitizer, {force = true})
        end
        if sanitizer == "thread" then
            add_files("data/loader_test.cpp", "train/threads_test.cpp")
        end
    target_end()
end

-- Ranks that train: real processes, against PyTorch's figures and against one process.
target("train")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("lockstep")
    add_deps("test_main")
    add_files("train/*_test.cpp")
    remove_files(table.unpack(gloo_tests))
    set_pcxxheader("pch_all.hpp")
    add_includedirs(".")
    add_syslinks("pthread")
    add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"")
    set_optimize("none")
    add_cxflags(sanitizers, {force = true})
    add_ldflags("-fsanitize=address,undefined", {force = true})
target_end()

-- Ranks that communicate and train through Gloo, and a job for several hosts (tests/network/run).
if has_config("gloo") then
    target("gloo")
        set_group("gloo")
        set_kind("binary")
        set_targetdir("$(projectdir)/build/tests")
        add_deps("lockstep", "test_main")
        add_files(gloo_tests)
        set_pcxxheader("pch_all.hpp")
        add_includedirs(".")
        add_links("gloo")
        add_syslinks("pthread")
        add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"")
        set_optimize("none")
        add_cxflags(sanitizers, {force = true})
        add_ldflags("-fsanitize=address,undefined", {force = true})
    target_end()

    target("network_job")
        set_group("gloo")
        set_kind("binary")
        set_targetdir("$(projectdir)/build/tests")
        add_deps("lockstep")
        add_files("network/job.cpp")
        add_includedirs("../examples")
        add_sysincludedirs("$(eigen)")
        add_links("gloo")
        add_syslinks("pthread", "z")
    target_end()
end

-- A program that launches itself and behaves as it is told: what tests/launch/run supervises.
target("trainer")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("lockstep")
    add_files("launch/trainer.cpp")
    add_syslinks("pthread")
target_end()

-- Two translation units with everything in them, one program.
target("link")
    set_kind("binary")
    set_targetdir("$(projectdir)/build/tests")
    add_deps("lockstep")
    add_files("link/*.cpp")
target_end()

-- Programs on GPUs: compiled and linked wherever nvcc is, run where a GPU is (tests/gpu/run).
if has_config("gpu") then
    -- Where nothing can be run, checks that would instantiate the same code once more are left out.
    local runs = #os.files("/dev/nvidia[0-9]*") > 0

    local function gpu_program(name, files, group)
        target(name)
            set_group(group or "gpu")
            set_kind("binary")
            set_targetdir("$(projectdir)/build/tests")
            add_deps("lockstep")
            add_files(files)
            add_includedirs(".", "../examples")
            add_syslinks("pthread")
            add_cugencodes("sm_90")
            set_optimize("none")  -- of host code; kernels are optimised all the same
            set_warnings("none")
            add_cuflags("-Xcompiler=-Wall,-Wextra", "-Werror=all-warnings", {force = true})
            add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"",
                        "LOCKSTEP_RUNS_ON_GPU=" .. (runs and 1 or 0))
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

    -- DDP, through each backend.
    gpu_program("ddp_threads", "gpu/ddp_threads.cu")
    target_end()
    if has_config("gloo") then
        gpu_program("ddp_gloo", "gpu/ddp_gloo.cu", "gpu_all")
            add_links("gloo")
        target_end()
        gpu_program("gloo_ranks", "gpu/gloo_ranks.cu", "gpu_all")
            add_links("gloo")
        target_end()

        -- Gloo for GPUs, and hierarchies on a stream of their own, with CUDA played by the tests: they run everywhere.
        for _, name in ipairs({"staged", "streamed"}) do
            target(name)
                set_group("gloo")
                set_kind("binary")
                set_targetdir("$(projectdir)/build/tests")
                add_deps("lockstep", "test_main")
                add_files("gpu/" .. name .. ".cpp")
                set_pcxxheader("pch_all.hpp")
                add_includedirs(".", "comm")
                add_sysincludedirs("$(cccl)/..")
                add_links("gloo")
                add_syslinks("pthread")
                set_optimize("none")
                add_cxflags(sanitizers, {force = true})
                add_ldflags("-fsanitize=address,undefined", {force = true})
            target_end()
        end
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

        -- The watch over NCCL, with CUDA and NCCL played by the test: it runs everywhere.
        target("nccl_watch")
            set_group("gpu")
            set_kind("binary")
            set_targetdir("$(projectdir)/build/tests")
            add_deps("lockstep")
            add_files("gpu/nccl_watch.cpp")
            add_sysincludedirs("$(cccl)/..")
            add_syslinks("pthread")
            set_optimize("none")
        target_end()
    end
end
