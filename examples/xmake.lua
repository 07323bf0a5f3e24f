-- One program per file, named after it without its number: 00_one_process.cpp is build/examples/one_process.
set_group("examples")

local function name_of(file)
    return (path.basename(file):gsub("^%d+_", ""))
end

for _, file in ipairs(os.files(path.join(os.scriptdir(), "*.cpp"))) do
    local reads_lmdb = name_of(file) == "lmdb"
    if has_config("lmdb") or not reads_lmdb then
        target(name_of(file))
            set_kind("binary")
            set_targetdir("$(projectdir)/build/examples")
            add_deps("lockstep_compiled")
            add_files(file)
            add_syslinks("pthread", "z")
            if reads_lmdb then add_syslinks("lmdb") end
            add_sysincludedirs("$(eigen)")
            -- The others take less time than their compiler.
            set_optimize(table.contains({"fashion_mnist", "convnet"}, name_of(file)) and "fastest" or "fast")
            -- Eigen uses the vector instructions it is compiled for, and x86-64's baseline has the oldest ones
            -- only. Examples run where they are built, so they may use all that this machine has.
            compile_for_this_machine()
            collect_late()
        target_end()
    end
end

-- Those for GPUs compile and link wherever nvcc and NCCL are, and for one of them cuDNN. Where nothing can be run, host
-- code need not be fast, and `./x test --long` alone compiles more than 04: the others have its code but for the network.
if has_config("gpu") and has_config("nccl") then
    local runs = #os.files("/dev/nvidia[0-9]*") > 0 or os.getenv("LOCKSTEP_GPU_HOST") == "1"
    for _, file in ipairs(os.files(path.join(os.scriptdir(), "*.cu"))) do
        local convolves = name_of(file) == "convnet_gpu"
        if has_cudnn() or not convolves then
            target(name_of(file))
                set_kind("binary")
                set_targetdir("$(projectdir)/build/examples")
                add_deps("lockstep_compiled")
                add_files(file)
                add_syslinks("pthread", "z")
                add_links("cublasLt", "nccl")
                if name_of(file) ~= "fashion_mnist_gpu" then set_group("gpu_all") end
                if convolves then link_cudnn() end
                compile_for_gpus()
                set_warnings("none")
                add_cuflags("-Xcompiler=-Wall,-Wextra", "-Werror=all-warnings", {force = true})
                set_optimize(runs and "fastest" or "none")
            target_end()
        end
    end
end

-- Those whose models are LibTorch modules: torch/00_name.cpp is build/examples/torch/name. What takes time is in LibTorch.
-- Three are compiled with the programs of docs/from-pytorch.md, below.
local together = {amp = true, data_parallel = true, own_loop = true}
if has_torch() then
    local alone = {}
    for _, file in ipairs(os.files(path.join(os.scriptdir(), "torch/*.cpp"))) do
        if not together[name_of(file)] then table.insert(alone, file) end
    end
    for _, file in ipairs(table.join(alone,
                                     has_torch_for_gpus() and has_config("nccl") and os.files(path.join(os.scriptdir(), "torch/*.cu")) or {})) do
        target("torch_" .. name_of(file))
            set_kind("binary")
            set_filename(name_of(file))
            set_targetdir("$(projectdir)/build/examples/torch")
            add_deps("lockstep_compiled")
            add_files(file)
            add_includedirs(".")
            add_syslinks("pthread", "z")
            link_torch()
            collect_late()
            if path.extension(file) == ".cu" then
                set_group("gpu_all")
                add_links("nccl")
                compile_for_gpus()
                set_warnings("none")
            end
            set_optimize("none")
        target_end()
    end
end

-- The programs of docs/from-pytorch.md, all in one file: LibTorch's headers take most of a compiler's time. Each is a name of the one program.
if has_torch() then
    target("from_pytorch")
        set_kind("binary")
        set_filename("all")
        set_targetdir("$(projectdir)/build/examples/from_pytorch")
        add_deps("lockstep_compiled")
        add_files("from_pytorch/all.cpp")
        add_syslinks("pthread", "z")
        link_torch()
        set_optimize("none")
        if (get_config("clang") or "") ~= "" then  -- as tests of LibTorch's modules are compiled
            set_toolset("cxx", "clang@" .. get_config("clang"))
            add_cxxflags("-fclang-abi-compat=17", "-Wno-unknown-pragmas", "-Wno-deprecated-declarations", {force = true})
            if is_arch("arm64") then add_cxxflags("-mllvm=-aarch64-enable-global-isel-at-O=-1", {force = true}) end
        else
            collect_late()
        end
        after_build(function (target)
            local torch = path.join(os.projectdir(), "build/examples/torch")
            os.mkdir(torch)
            for _, name in ipairs({"amp", "data_parallel", "own_loop"}) do
                if not os.exists(path.join(torch, name)) then os.ln("../from_pytorch/all", path.join(torch, name)) end
            end
            for _, file in ipairs(os.files(path.join(os.projectdir(), "examples/from_pytorch/*.cpp"))) do
                local link = path.join(target:targetdir(), path.basename(file))
                if path.basename(file) ~= "all" and (has_config("gloo") or path.basename(file) ~= "groups") and not os.exists(link) then
                    os.ln("all", link)
                end
            end
        end)
    target_end()
end
