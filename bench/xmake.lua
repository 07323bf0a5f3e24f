-- One folder per question; each prints a table of ratios and writes build/bench/NAME.json.
set_group("bench")

-- Ranks, turns and times, for those that measure ranks.
target("bench_support")
    set_kind("static")
    set_default(false)
    add_files("support/*.cpp")
    add_includedirs("support", {public = true})
    set_optimize("fastest")
target_end()

for _, main in ipairs(os.files(path.join(os.scriptdir(), "*/main.cpp"))) do
    local folder = path.directory(main)
    local name = path.filename(folder)
    if name ~= "torch" or has_torch() then
        target("bench_" .. name)
            set_kind("binary")
            set_targetdir("$(projectdir)/build/bench")
            add_deps("lockstep_compiled", "bench_support")
            add_files(path.join(folder, "*.cpp"))
            add_syslinks("pthread", "z")
            add_defines("LOCKSTEP_GLOO=" .. (has_config("gloo") and 1 or 0), "LOCKSTEP_LMDB=" .. (has_config("lmdb") and 1 or 0),
                        "LOCKSTEP_MPI=" .. (has_mpi() and 1 or 0))
            if (name == "allreduce" or name == "step") and has_mpi() then link_mpi() end
            if (name == "allreduce" or name == "step" or name == "network" or name == "zero" or name == "hooks" or name == "feed" or name == "fully_sharded") and has_config("gloo") then
                add_links("gloo")
            end
            if name == "launch" then add_includedirs("../tests") end  -- the clients of a large job, emulated
            if name == "torch" then link_torch() end
            if name == "loader" and has_config("lmdb") then add_syslinks("lmdb") end
            if name == "matmul" or name == "step" or name == "network" or name == "dp" or name == "zero" or name == "hooks" or name == "norm" or name == "fully_sharded" or
                name == "loader" then
                add_includedirs("../examples")
                add_sysincludedirs("$(eigen)")
                compile_for_this_machine()  -- as the examples have it
            end
            set_optimize("fastest")
            add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"", "LOCKSTEP_CCCL=\"$(cccl)\"", "LOCKSTEP_EIGEN=\"$(eigen)\"")
        target_end()
    end
end

-- Run where a GPU is; compiled and linked wherever nvcc is.
local function gpu_benchmark()
    set_kind("binary")
    set_default(false)
    set_targetdir("$(projectdir)/build/bench")
    add_deps("lockstep_compiled", "bench_support")
    add_includedirs("gpu", "../examples")
    add_syslinks("pthread")
    add_links("cublasLt")
    compile_for_gpus()
    set_warnings("none")
    add_cuflags("-Xcompiler=-Wall,-Wextra", "-Werror=all-warnings", {force = true})
    set_optimize("fastest")
    add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"")
end

if has_config("gpu") then
    target("bench_gpu")
        gpu_benchmark()
        add_files("gpu/*.cu", "gpu/*.cpp")
    target_end()

    -- The parts of these that are on a GPU.
    for _, name in ipairs({"checkpoint", "loader", "norm", "zero", "fully_sharded"}) do
        target("bench_" .. name .. "_gpu")
            gpu_benchmark()
            add_files(name .. "/gpu.cu")
        target_end()
    end

    if has_torch_for_gpus() and os.isfile(path.join(os.scriptdir(), "torch/gpu.cu")) then
        target("bench_torch_gpu")
            set_kind("binary")
            set_default(false)
            set_targetdir("$(projectdir)/build/bench")
            add_deps("lockstep_compiled", "bench_support")
            add_files("torch/gpu.cu", "gpu/table.cpp", "gpu/step_times.cpp")
            add_includedirs("gpu", "../examples")
            add_syslinks("pthread")
            link_torch()
            compile_for_gpus()
            set_warnings("none")
            set_optimize("fastest")
            add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"")
        target_end()
    end

    if has_cudnn_frontend() then
        target("bench_gpt2")
            gpu_benchmark()
            add_deps("cudnn_attention")
            add_files("gpt2/main.cu")
            link_cudnn()
        target_end()
    end

    -- A network of convolutions, which are cuDNN's.
    if has_cudnn() then
        target("bench_convnet")
            gpu_benchmark()
            add_files("convnet/main.cu", "gpu/step_times.cpp")
            link_cudnn()
        target_end()
    end

    -- Several GPUs, measured by tests/gpu/many, which is why it is built with the programs of that folder.
    if has_config("nccl") then
        target("bench_many")
            set_group("gpu_all")
            gpu_benchmark()
            add_files("many/many.cu")
            add_links("nccl")
        target_end()
    end
end
