-- One folder per question; each prints a table of ratios and writes build/bench/NAME.json.
set_group("bench")

for _, folder in ipairs(os.dirs(path.join(os.scriptdir(), "*"))) do
    target("bench_" .. path.filename(folder))
        set_kind("binary")
        set_targetdir("$(projectdir)/build/bench")
        add_deps("lockstep")
        add_files(path.join(folder, "*.cpp"))
        add_syslinks("pthread")
        if path.filename(folder) == "allreduce" and os.isfile("/usr/include/gloo/allreduce.h") then
            add_links("gloo")
        end
        if path.filename(folder) == "matmul" then
            add_includedirs("../examples")
            add_sysincludedirs("$(eigen)")
            add_cxflags("-march=native")  -- as the examples have it
        end
        set_optimize("fastest")
        add_defines("LOCKSTEP_SOURCE_DIR=\"" .. path.directory(os.scriptdir()) .. "\"", "LOCKSTEP_CCCL=\"$(cccl)\"")
    target_end()
end
