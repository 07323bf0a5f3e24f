-- One program per file, named after it without its number: 00_one_process.cpp is build/examples/one_process.
set_group("examples")

local function name_of(file)
    return (path.basename(file):gsub("^%d+_", ""))
end

-- One program that is several examples, and runs as it is called: `links` are their places in build/examples.
rule("links")
    after_build(function (target)
        local folder = path.join(os.projectdir(), "build/examples")
        for _, name in ipairs(target:values("links")) do
            local link = path.join(folder, name)
            if not os.islink(link) then
                os.tryrm(link)  -- a program, as it was built before
                os.mkdir(path.directory(link))
                os.ln(path.relative(target:targetfile(), path.directory(link)), link)
            end
        end
    end)
rule_end()

local function example(name, files)
    target(name)
        set_kind("binary")
        set_targetdir("$(projectdir)/build/examples")
        add_deps("lockstep_compiled")
        add_files(files)
        add_syslinks("pthread", "z")
        add_sysincludedirs("$(eigen)")
        -- Eigen uses the vector instructions it is compiled for, and x86-64's baseline has the oldest ones
        -- only. Examples run where they are built, so they may use all that this machine has.
        compile_for_this_machine()
        collect_late()
end

-- Two train for long enough that it matters how they are compiled.
local alone = {fashion_mnist = true, convnet = true}
local together = {}
for _, file in ipairs(os.files(path.join(os.scriptdir(), "*.cpp"))) do
    local name = name_of(file)
    if alone[name] then
        example(name, file)
            set_optimize("fastest")
        target_end()
    elseif name ~= "all" and name ~= "cudnn_attention" and (name ~= "lmdb" or has_config("lmdb")) and (name ~= "fully_sharded" or has_config("gloo")) then
        table.insert(together, name)
    end
end
-- The others take less time than their compiler, so they are one file and one program. With --long each is compiled alone, too.
example("examples", "all.cpp")
    set_filename("all")
    set_optimize("fast")
    add_defines("LOCKSTEP_HAS_LMDB=" .. (has_config("lmdb") and 1 or 0))
    if has_config("lmdb") then add_syslinks("lmdb") end
    add_defines("LOCKSTEP_HAS_GLOO=" .. (has_config("gloo") and 1 or 0))
    if has_config("gloo") then add_links("gloo") end
    add_rules("links")
    set_values("links", table.unpack(together))
target_end()

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

-- GPT-2 with passes of its own. The header of cuDNN's attention takes as long to compile as all of the model.
if has_config("gpu") and has_cudnn_frontend() then
    target("cudnn_attention")
        set_group("gpu_all")
        set_kind("static")
        set_targetdir("$(projectdir)/build/examples")
        add_files("cudnn_attention.cpp")
        add_includedirs(".")
        add_sysincludedirs("$(cudnn_frontend)", "/usr/local/cuda/include")
        link_cudnn()
        add_linkdirs("/usr/local/cuda/lib64", "/usr/local/cuda/lib64/stubs", {public = true})
        add_links("nvrtc", "cuda", "cudart", {public = true})
        set_optimize("fast")
    target_end()
end
if has_config("gpu") and has_cudnn_frontend() and has_config("nccl") then
    target("gpt2")
        set_group("gpu_all")
        set_kind("binary")
        set_targetdir("$(projectdir)/build/examples")
        add_deps("lockstep_compiled", "cudnn_attention")
        add_files("gpt2/main.cu")
        add_includedirs(".")
        add_syslinks("pthread")
        add_links("cublasLt", "nccl")
        link_cudnn()
        compile_for_gpus()
        set_warnings("none")
        add_cuflags("-Xcompiler=-Wall,-Wextra", "-Werror=all-warnings", {force = true})
        set_optimize("none")
    target_end()
end

-- GPT-2, a LibTorch module on GPUs: build/examples/torch/gpt2. What takes time is in LibTorch.
if has_torch_for_gpus() and has_config("nccl") then
    target("torch_gpt2")
        set_group("gpu_all")
        set_kind("binary")
        set_filename("gpt2")
        set_targetdir("$(projectdir)/build/examples/torch")
        add_deps("lockstep_compiled")
        add_files("torch/gpt2.cu")
        add_includedirs(".")
        add_links("nccl")
        add_syslinks("pthread", "z")
        link_torch()
        compile_for_gpus()
        set_warnings("none")
        set_optimize("none")
    target_end()
end

-- The programs of docs/from-pytorch.md, and of torch/, all in one file: LibTorch's headers take most of a compiler's time.
if has_torch() then
    local links = {}
    for _, file in ipairs(os.files(path.join(os.scriptdir(), "*/*.cpp"))) do
        local name = path.join(path.filename(path.directory(file)), name_of(file))
        if name_of(file) ~= "all" and (has_config("gloo") or (name ~= "from_pytorch/groups" and name ~= "from_pytorch/fully_shard")) then table.insert(links, name) end
    end
    target("from_pytorch")
        set_kind("binary")
        set_filename("all")
        set_targetdir("$(projectdir)/build/examples/from_pytorch")
        add_deps("lockstep_compiled")
        add_files("from_pytorch/all.cpp")
        add_includedirs(".")
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
        add_rules("links")
        set_values("links", table.unpack(links))
    target_end()
end
